"""Models added after the simulator's rules were written: a blind test, predicted before they were recorded."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gpt2.study.others.subjects import Subject, causal, classify_pixels, from_transformers, images, tokens


def _sequence_class(model, data):
    return model(input_ids=data[0], attention_mask=torch.ones_like(data[0]), labels=data[0][:, 0] % 2).loss


class NanoGpt(nn.Module):
    """A compact GPT with fused attention, no biases, a tied head."""

    def __init__(self, layers: int = 8, width: int = 512, heads: int = 8, vocabulary: int = 50_304, context: int = 512):
        super().__init__()
        self.heads = heads
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width, bias=False),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "norm2": nn.LayerNorm(width, bias=False),
                    "up": nn.Linear(width, 4 * width, bias=False),
                    "down": nn.Linear(4 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        B, T = tokens.shape
        x = self.embed(tokens) + self.place(torch.arange(T, device=tokens.device))
        for block in self.blocks:
            q, k, v = (
                t.view(B, T, self.heads, -1).transpose(1, 2) for t in block["qkv"](block["norm1"](x)).chunk(3, dim=-1)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
            x = x + F.dropout(block["out"](y.transpose(1, 2).reshape(B, T, -1)), 0.1)
            x = x + block["down"](F.silu(block["up"](block["norm2"](x))))
        return self.head(self.norm(x))


class UNet(nn.Module):
    """Two levels down, two up, with skips and group norm."""

    def __init__(self, width: int = 64):
        super().__init__()

        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU())

        self.down1, self.down2, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        m = self.middle(F.max_pool2d(b, 2))
        y = self.up2(torch.cat([F.interpolate(m, scale_factor=2), b], 1))
        return self.out(self.up1(torch.cat([F.interpolate(y, scale_factor=2), a], 1)))


class Translator(nn.Module):
    """torch.nn.Transformer, encoder and decoder."""

    def __init__(self, vocabulary: int = 16_000, width: int = 512):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.net = nn.Transformer(width, 8, 4, 4, 2048, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        return self.head(self.net(x, x, tgt_mask=mask, tgt_is_causal=True))


def _next_token(model, data):
    logits = model(data[0])
    return F.cross_entropy(logits.flatten(0, 1), data[0].flatten())


def _denoise(model, data):
    noise = torch.randn_like(data[0])
    return F.mse_loss(model(data[0] + noise), noise)


STRANGERS = {
    s.name: s
    for s in (
        Subject(
            "t5",
            from_transformers("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, pad_token_id=0),
            tokens(32_128, 256),
            causal,
        ),
        Subject(
            "opt", from_transformers("OPTForCausalLM", "OPTConfig", num_hidden_layers=8), tokens(50_272, 512), causal
        ),
        Subject(
            "qwen2",
            from_transformers(
                "Qwen2ForCausalLM",
                "Qwen2Config",
                vocab_size=32_000,
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=8,
                num_attention_heads=14,
                num_key_value_heads=2,
            ),
            tokens(32_000, 512),
            causal,
        ),
        Subject(
            "neox",
            from_transformers(
                "GPTNeoXForCausalLM",
                "GPTNeoXConfig",
                hidden_size=768,
                num_hidden_layers=8,
                num_attention_heads=12,
                intermediate_size=3072,
            ),
            tokens(50_432, 512),
            causal,
        ),
        Subject(
            "distilbert",
            from_transformers("DistilBertForSequenceClassification", "DistilBertConfig"),
            tokens(30_522, 256),
            _sequence_class,
        ),
        Subject(
            "swin",
            from_transformers("SwinForImageClassification", "SwinConfig", num_labels=1000),
            images(224, 1000),
            classify_pixels,
        ),
        Subject(
            "convnext",
            from_transformers("ConvNextForImageClassification", "ConvNextConfig", num_labels=1000),
            images(224, 1000),
            classify_pixels,
        ),
        Subject("nanogpt", NanoGpt, tokens(50_304, 512), _next_token),
        Subject("unet", UNet, images(64, 10), _denoise),
        Subject("translator", Translator, tokens(16_000, 128), _next_token),
    )
}
