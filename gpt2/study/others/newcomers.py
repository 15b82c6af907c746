"""More models that no rule was written for: the second blind test, predicted before they were recorded.

The first one is in `strangers`. Transformers are small in depth and ordinary in everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from gpt2.study.others.subjects import Subject, classify, classify_pixels, from_transformers


def _tokens(batch: int, length: int, vocabulary: int = 30_000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def _images(batch: int, side: int = 224) -> torch.Tensor:
    return torch.randn(batch, 3, side, side)


def _labels(batch: int) -> torch.Tensor:
    return torch.randint(0, 2, (batch,))


def _hugging_face(name: str, model: str, config: str, data: Callable, **options) -> Subject:
    """A model of `transformers`: `data(batch)` is a dict of its forward's arguments."""
    names: list[str] = []

    def tensors(batch: int):
        made = data(batch)
        names[:] = made
        return tuple(made.values())

    build = from_transformers(model, config, **options)
    return Subject(name, build, tensors, lambda net, data: net(**dict(zip(names, data, strict=True))).loss)


def _text(length: int = 256):
    def data(batch: int) -> dict:
        tokens = _tokens(batch, length)
        return {"input_ids": tokens, "labels": tokens}

    return data


def _pictures(side: int = 224):
    return lambda batch: {"pixel_values": _images(batch, side), "labels": _labels(batch)}


def _language(name: str, family: str, ending: str = "ForCausalLM", length: int = 256, **options) -> Subject:
    return _hugging_face(name, f"{family}{ending}", f"{family}Config", _text(length),
                         **{"vocab_size": 30_000} | options)


def _vision(name: str, family: str, side: int = 224, **options) -> Subject:
    return _hugging_face(name, f"{family}ForImageClassification", f"{family}Config", _pictures(side), **options)


class Tagger(nn.Module):
    """Words in, words out, through two layers of LSTM or a bidirectional GRU."""

    def __init__(self, kind: type[nn.RNNBase], words: int, width: int, hidden: int, **options):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.net = kind(width, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden * (2 if self.net.bidirectional else 1), words)

    def forward(self, tokens):
        return self.head(self.net(self.embed(tokens))[0])


def _next_word(model, data):
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[0].flatten())


def _vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * 49, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 10))


def _gan() -> nn.Module:
    """DCGAN's generator, and its discriminator behind it."""

    def up(a: int, b: int, stride: int = 2) -> list[nn.Module]:
        made = nn.ConvTranspose2d(a, b, 4, stride, 0 if stride == 1 else 1, bias=False)
        return [made, nn.BatchNorm2d(b), nn.ReLU(True)]

    def down(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, True)]

    return nn.Sequential(
        *up(100, 512, 1), *up(512, 256), *up(256, 128), *up(128, 64), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), *down(64, 128), *down(128, 256), *down(256, 512),
        nn.Conv2d(512, 1, 4, 1, 0))


def _autoencoder() -> nn.Module:
    down = [layer for a, b in ((3, 32), (32, 64), (64, 128)) for layer in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())]
    wider = ((128, 64), (64, 32), (32, 3))
    up = [layer for a, b in wider for layer in (nn.ConvTranspose2d(a, b, 3, 2, 1, 1), nn.ReLU())]
    return nn.Sequential(*down, *up)


class DeepUNet(nn.Module):
    """Four levels, two convolutions each, transposed convolutions up."""

    def __init__(self, widths: tuple[int, ...] = (48, 96, 192, 384)):
        super().__init__()

        def level(a: int, b: int) -> nn.Module:
            part = lambda c: [nn.Conv2d(c, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU()]  # noqa: E731
            return nn.Sequential(*part(a), *part(b))

        self.down = nn.ModuleList(level(a, b) for a, b in zip((3, *widths), widths, strict=False))
        steps = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in steps)
        self.join = nn.ModuleList(level(2 * b, b) for _, b in steps)
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x):
        kept = []
        for number, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.out(x)


def _square(model, data):
    return model(data[0]).float().pow(2).mean()


def _masked(batch: int) -> dict:
    return _text()(batch) | {"attention_mask": torch.ones(batch, 256, dtype=torch.long)}


_SMALL = {"hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
_GATED = _SMALL | {"intermediate_size": 1536}

NEWCOMERS = {
    subject.name: subject
    for subject in (
        _vision("resnet50", "ResNet"),
        _vision("regnet", "RegNet"),
        _vision("convnextv2", "ConvNextV2", depths=[2, 2, 2, 2]),
        _vision("mobilenetv1", "MobileNetV1"),
        _vision("mobilenetv2", "MobileNetV2"),
        _vision("efficientnet", "EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, image_size=224,
                hidden_dim=1280),
        _vision("dinov2", "Dinov2", num_hidden_layers=4, image_size=224),
        _vision("beit", "Beit", num_hidden_layers=4),
        _vision("poolformer", "PoolFormer"),
        _vision("mobilevit", "MobileViT", 256),
        _hugging_face("segformer", "SegformerForSemanticSegmentation", "SegformerConfig",
                      lambda batch: {"pixel_values": _images(batch, 256),
                                     "labels": torch.randint(0, 10, (batch, 256, 256))}, num_labels=10),
        _hugging_face("bert-masked", "BertForMaskedLM", "BertConfig", _masked, num_hidden_layers=4),
        _language("deberta", "DebertaV2", "ForMaskedLM", num_hidden_layers=3, hidden_size=768, num_attention_heads=12,
                  intermediate_size=3072, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=64,
                  norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0),
        _language("albert", "Albert", "ForMaskedLM", hidden_size=768, num_attention_heads=12, intermediate_size=3072,
                  num_hidden_layers=4),
        _language("electra", "Electra", "ForMaskedLM", num_hidden_layers=4),
        _language("bart", "Bart", "ForConditionalGeneration", d_model=512, encoder_layers=2, decoder_layers=2,
                  encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8),
        _language("qwen3", "Qwen3", num_key_value_heads=2, head_dim=64, **_GATED),
        _language("gemma2", "Gemma2", num_key_value_heads=4, head_dim=64, **_GATED),
        _language("bloom", "Bloom", hidden_size=512, n_layer=3, n_head=8),
        _language("falcon", "Falcon", **_SMALL),
        _language("phi", "Phi", intermediate_size=2048, **_SMALL),
        _language("mamba", "Mamba", length=64, hidden_size=384, num_hidden_layers=2),
        _language("gptj", "GPTJ", n_embd=512, n_layer=3, n_head=8, rotary_dim=32),
        _hugging_face("wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
                      lambda batch: {"input_values": torch.randn(batch, 16_000), "labels": _labels(batch)},
                      num_hidden_layers=3, apply_spec_augment=False, mask_time_prob=0.0),
        _hugging_face("whisper", "WhisperForConditionalGeneration", "WhisperConfig",
                      lambda batch: {"input_features": torch.randn(batch, 80, 3000),
                                     "labels": _tokens(batch, 64, 51_865)}, encoder_layers=2, decoder_layers=2),
        Subject("word-lstm", lambda: Tagger(nn.LSTM, 20_000, 400, 800, num_layers=2, dropout=0.2),
                lambda batch: (_tokens(2 * batch, 70, 20_000),), _next_word),
        Subject("word-gru", lambda: Tagger(nn.GRU, 20_000, 256, 384, bidirectional=True),
                lambda batch: (_tokens(4 * batch, 120, 20_000),), _next_word),
        Subject("vgg", _vgg, lambda batch: (_images(batch), _labels(batch)), classify),
        Subject("dcgan", _gan, lambda batch: (torch.randn(4 * batch, 100, 1, 1),), _square),
        Subject("autoencoder", _autoencoder, lambda batch: (_images(4 * batch, 128),), _square),
        Subject("deep-unet", DeepUNet, lambda batch: (_images(batch, 128),), _square),
        Subject("resnet50-last", lambda: _channels_last(), lambda batch: (
            _images(2 * batch).to(memory_format=torch.channels_last), _labels(2 * batch)),
            classify_pixels),
    )
}


def _channels_last() -> nn.Module:
    """ResNet-50 in channels-last layout, as people run it in bf16."""
    return NEWCOMERS["resnet50"].build().to(memory_format=torch.channels_last)


def runs() -> Iterator[tuple[str, int, str]]:
    """(name, batch, precision) of every run: convolution nets in both precisions, the others in turns."""
    both = {"resnet50", "convnextv2", "mobilenetv2", "vgg", "dcgan", "autoencoder", "deep-unet", "word-lstm"}
    batches = {"mamba": 2, "whisper": 2, "wav2vec2": 4}
    for number, name in enumerate(NEWCOMERS):
        precisions = ("fp32", "bf16") if name in both else ("bf16",) if number % 2 or "last" in name else ("fp32",)
        yield from ((name, batches.get(name, 8), precision) for precision in precisions)
