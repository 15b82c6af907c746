"""Models that are not ours, each with its data and loss: what a prediction is tried on.

Every subject is built from configurations and random numbers; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Subject:
    """`build()` makes the model on the host, `data(batch)` host tensors, `loss(model, data)` a scalar."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[torch.Tensor, ...]]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]


def tokens(vocabulary: int, length: int):
    """`data` of random words."""
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)


def causal(model, data):
    """`loss` of a language model of `transformers`."""
    return model(input_ids=data[0], labels=data[0]).loss


def from_transformers(model: str, config: str, **options):
    """`build` of a model of `transformers`, which is imported only then."""

    def build():
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def images(side: int, classes: int):
    """`data` of random pictures and labels."""
    return lambda batch: (torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,)))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, width_in: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's shapes and names: 122 tensors, 46,796,528 bytes in fp32."""

    def __init__(self, classes: int = 1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = (64, 64, 128, 256, 512)
        for i in range(1, 5):
            stride = 1 if i == 1 else 2
            self.add_module(
                f"layer{i}",
                nn.Sequential(Residual(widths[i - 1], widths[i], stride), Residual(widths[i], widths[i], 1)),
            )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class SmallCnn(nn.Module):
    """Three convolutions and a linear layer."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Mlp(nn.Module):
    """A deep multilayer perceptron with dropout."""

    def __init__(self):
        super().__init__()
        layers: list[nn.Module] = []
        for width_in, width in ((784, 4096), (4096, 4096), (4096, 2048), (2048, 1024)):
            layers += [nn.Linear(width_in, width), nn.ReLU(), nn.Dropout(0.2)]
        self.net = nn.Sequential(*layers, nn.Linear(1024, 10))

    def forward(self, x):
        return self.net(x)


class TorchTransformer(nn.Module):
    """torch.nn's own encoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10_000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(512, 10_000)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


class Recurrent(nn.Module):
    """A two-layer LSTM language model."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10_000, 512)
        self.lstm = nn.LSTM(512, 1024, 2, batch_first=True)
        self.head = nn.Linear(1024, 10_000)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


def classify(model, data):
    """`loss` of a classifier."""
    return F.cross_entropy(model(data[0]), data[1])


def classify_pixels(model, data):
    """`loss` of an image classifier of `transformers`."""
    return model(pixel_values=data[0], labels=data[1]).loss


def _next_token(model, data):
    logits = model(data[0])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), data[0].view(-1))


SUBJECTS = {
    s.name: s
    for s in (
        Subject("hf-gpt2", from_transformers("GPT2LMHeadModel", "GPT2Config"), tokens(50_257, 512), causal),
        Subject(
            "hf-llama",
            from_transformers(
                "LlamaForCausalLM",
                "LlamaConfig",
                vocab_size=32_000,
                hidden_size=1024,
                intermediate_size=2816,
                num_hidden_layers=12,
                num_attention_heads=16,
                num_key_value_heads=4,
                max_position_embeddings=2048,
            ),
            tokens(32_000, 1024),
            causal,
        ),
        Subject("hf-bert", from_transformers("BertForMaskedLM", "BertConfig"), tokens(30_522, 512), causal),
        Subject(
            "hf-vit",
            from_transformers("ViTForImageClassification", "ViTConfig", num_labels=1000),
            images(224, 1000),
            classify_pixels,
        ),
        Subject("resnet18", ResNet18, images(224, 1000), classify),
        Subject("small-cnn", SmallCnn, images(64, 10), classify),
        Subject("mlp", Mlp, lambda batch: (torch.randn(batch, 784), torch.randint(0, 10, (batch,))), classify),
        Subject("torch-transformer", TorchTransformer, tokens(10_000, 256), _next_token),
        Subject("lstm", Recurrent, tokens(10_000, 128), _next_token),
    )
}


def train(
    subject: Subject, *, watch, batch: int, steps: int = 3, precision: str = "fp32", optimizer: str = "AdamW"
) -> None:
    """An ordinary training loop on device "cuda"."""
    torch.manual_seed(0)
    model = subject.build()
    with watch("model", 0):
        model = model.cuda()
    model.train()
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    for step in range(1, steps + 1):
        with watch("batch", step):
            data = tuple(t.cuda() for t in subject.data(batch))
        with watch("forward", step):
            with torch.autocast("cuda", dtype=dtype, enabled=precision != "fp32"):
                loss = subject.loss(model, data)
        with watch("backward", step):
            loss.backward()
        with watch("optimizer", step):
            optimizer.step()
        with watch("zero_grad", step):
            optimizer.zero_grad()
