"""Kernels one by one on a real GPU: what does each take besides its outputs?

Each probe runs an operation forward and backward with PyTorch's memory history on; the sizes that appear, in order,
are the evidence behind the rules of `gpt2/memory/kernels/scratch.py`. Run by `make measure`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from gpt2.study.probes import runs
from gpt2.study.words import no_gpu, parser


def _history(function: Callable) -> list[tuple[str, int]]:
    """(+ or -, bytes) of every allocation and free while `function` runs."""
    return [("+" if size > 0 else "-", abs(size)) for size in runs.history(function)]


def _run(function: Callable, inputs: tuple):
    kept = []
    yield "forward", _history(lambda: kept.append(function(*inputs)))
    out = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    if torch.is_tensor(out) and out.requires_grad:
        grad = torch.ones_like(out)
        yield "backward", _history(lambda: out.backward(grad))


def probe(make: Callable) -> dict:
    """`make()` returns (function, inputs): run twice, forward and backward listed apart, the second time kept too."""
    rows = {}
    for turn in ("first", "again"):
        for name, history in _run(*make()):
            rows[f"{turn} {name}"] = history
    return rows


def rand(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad and dtype.is_floating_point)


def ints(high, *shape):
    return torch.randint(0, high, shape, device="cuda")


def probes() -> Iterable[tuple[str, Callable]]:
    """Name and maker of every probe."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    yield "warm", lambda: (F.linear, (rand(64, 64), rand(64, 64), rand(64)))
    shapes = (
        (8, 12, 1024, 64),
        (4, 16, 1024, 64),
        (2, 16, 2048, 128),
        (8, 12, 512, 64),
        (3, 5, 200, 64),
        (2, 4, 333, 80),
        (2, 8, 1024, 96),
        (16, 8, 64, 32),
        (1, 2, 4096, 256),
        (4, 12, 197, 64),
    )
    for (B, H, S, K), dtype, causal in itertools.product(shapes, (f32, bf16, f16), (True, False)):

        def sdpa(B=B, H=H, S=S, K=K, dtype=dtype, causal=causal, drop=0.0):
            qkv = rand(B, S, 3 * H * K, dtype=dtype)

            def call(x):
                q, k, v = (t.view(B, S, H, K).transpose(1, 2) for t in x.split(H * K, dim=2))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=drop)
                return y.transpose(1, 2).contiguous().view(B, S, H * K)

            return call, (qkv,)

        yield f"sdpa {B},{H},{S},{K} {dtype} causal={causal}", sdpa
        if (B, H, S, K) == shapes[0] and causal:
            yield f"sdpa {B},{H},{S},{K} {dtype} dropout", lambda s=sdpa: s(drop=0.1)
    for dtype in (f32, bf16):

        def masked(dtype=dtype):
            mask = torch.zeros(4, 1, 256, 256, device="cuda", dtype=dtype)
            return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), tuple(
                rand(4, 8, 256, 64, dtype=dtype) for _ in range(3)
            )

        yield f"sdpa mask {dtype}", masked

        def boolean(dtype=dtype):
            mask = torch.ones(4, 1, 256, 256, device="cuda", dtype=torch.bool)
            return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), tuple(
                rand(4, 8, 256, 64, dtype=dtype) for _ in range(3)
            )

        yield f"sdpa bool mask {dtype}", boolean
        yield (
            f"sdpa gqa {dtype}",
            lambda dtype=dtype: (
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                (rand(4, 16, 512, 64, dtype=dtype), rand(4, 4, 512, 64, dtype=dtype), rand(4, 4, 512, 64, dtype=dtype)),
            ),
        )
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        for B, H, S, K in shapes[:6]:

            def forced(backend=backend, B=B, H=H, S=S, K=K):
                def call(q, k, v):
                    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

                return call, tuple(rand(B, H, S, K, dtype=bf16) for _ in range(3))

            yield f"sdpa {backend} {B},{H},{S},{K}", forced
    for rows, width in (
        (8192, 768),
        (1024, 768),
        (100, 768),
        (65536, 768),
        (65537, 256),
        (200_000, 64),
        (70_000, 3072),
    ):
        for dtype in (f32, bf16):
            yield (
                f"layer_norm {rows},{width} {dtype}",
                lambda r=rows, w=width, d=dtype: (
                    lambda x, g, b: F.layer_norm(x, (w,), g, b),
                    (rand(r, w, dtype=d), rand(w, dtype=d), rand(w, dtype=d)),
                ),
            )
            if rows in (8192, 100):
                yield (
                    f"rms_norm {rows},{width} {dtype}",
                    lambda r=rows, w=width, d=dtype: (
                        lambda x, g: F.rms_norm(x, (w,), g),
                        (rand(r, w, dtype=d), rand(w, dtype=d)),
                    ),
                )
    for n, rows, width in (
        (3072, 50257, 768),
        (3073, 50257, 768),
        (4096, 50257, 768),
        (8192, 50257, 768),
        (16384, 50257, 768),
        (20480, 50257, 768),
        (8192, 1000, 64),
        (65536, 32000, 128),
        (5000, 2, 768),
        (4096, 512, 768),
        (200_000, 50257, 64),
        (4096, 50257, 1024),
    ):
        yield (
            f"embedding {n},{rows},{width}",
            lambda n=n, r=rows, w=width: (lambda w_, i: F.embedding(i, w_), (rand(r, w), ints(r, n))),
        )
        if n in (4096, 8192):
            yield (
                f"embedding bf16 {n},{rows},{width}",
                lambda n=n, r=rows, w=width: (lambda w_, i: F.embedding(i, w_), (rand(r, w, dtype=bf16), ints(r, n))),
            )
    for shape, dim in (
        ((8192, 768), 0),
        ((8192, 2304), 0),
        ((4096, 3072), 0),
        ((1000, 777), 0),
        ((333, 50257), 0),
        ((8192, 768), 1),
        ((1 << 24,), None),
        ((64, 1 << 16), 1),
        ((16, 128, 56, 56), (0, 2, 3)),
        ((8, 1024, 768), (0, 1)),
        ((8, 1024, 768), 0),
        ((512, 10), 0),
        ((100_000, 3), 0),
        ((2, 1 << 20), 1),
        ((197, 16, 768), 0),
    ):
        for dtype in (f32, bf16):
            for name in ("sum", "mean", "amax", "norm"):

                def reduce(shape=shape, dim=dim, dtype=dtype, name=name):
                    x = rand(*shape, dtype=dtype, grad=False)
                    op = {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "norm": torch.linalg.vector_norm}[
                        name
                    ]
                    return (lambda x: op(x) if dim is None else op(x, dim=dim)), (x,)

                yield f"{name} {shape} {dim} {dtype}", reduce
    yield "softmax dim", lambda: (lambda x: x.softmax(1), (rand(8, 1024, 64),))
    yield "softmax bf16", lambda: (lambda x: x.softmax(-1), (rand(8, 12, 512, 512, dtype=bf16),))
    yield "softmax bf16->fp32", lambda: (lambda x: F.softmax(x, -1, dtype=f32), (rand(8, 12, 512, 512, dtype=bf16),))
    yield "log_softmax fp16->fp32", lambda: (lambda x: F.log_softmax(x, -1, dtype=f32), (rand(512, 5000, dtype=f16),))
    yield "log_softmax bf16", lambda: (lambda x: F.log_softmax(x, -1), (rand(512, 5000, dtype=bf16),))
    yield "softmax noncontiguous", lambda: (lambda x: x.transpose(0, 1).softmax(-1), (rand(256, 128, 512),))
    for reduction in ("mean", "sum", "none"):
        yield (
            f"cross_entropy {reduction}",
            lambda r=reduction: (lambda x, t: F.cross_entropy(x, t, reduction=r), (rand(4096, 5000), ints(5000, 4096))),
        )
    yield (
        "cross_entropy smoothing",
        lambda: (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (rand(4096, 5000), ints(5000, 4096))),
    )
    yield "cross_entropy bchw", lambda: (lambda x, t: F.cross_entropy(x, t), (rand(4, 21, 64, 64), ints(21, 4, 64, 64)))
    yield (
        "bce logits",
        lambda: (lambda x, t: F.binary_cross_entropy_with_logits(x, t), (rand(4096, 500), rand(4096, 500, grad=False))),
    )
    yield "mse", lambda: (lambda x, t: F.mse_loss(x, t), (rand(4096, 500), rand(4096, 500, grad=False)))
    yield "dropout", lambda: (lambda x: F.dropout(x, 0.1), (rand(4096, 512),))
    yield "dropout bf16", lambda: (lambda x: F.dropout(x, 0.1), (rand(4096, 512, dtype=bf16),))
    for k in (1, 4, 148):

        def norms(k=k):
            tensors = [rand(768, 768, grad=False) for _ in range(k)]
            return (lambda *t: torch._foreach_norm(t)[0]), tuple(tensors)

        yield f"foreach_norm {k}", norms
        yield (
            f"foreach_norm bf16 {k}",
            lambda k=k: (
                (lambda *t: torch._foreach_norm(t)[0]),
                tuple(rand(100, 3000, dtype=bf16, grad=False) for _ in range(k)),
            ),
        )
    convs = (
        (16, 3, 224, 64, 7, 2, 3),
        (16, 64, 56, 64, 3, 1, 1),
        (16, 64, 56, 128, 3, 2, 1),
        (16, 64, 56, 128, 1, 2, 0),
        (16, 256, 14, 512, 3, 2, 1),
        (32, 512, 7, 512, 3, 1, 1),
        (64, 3, 64, 32, 3, 1, 1),
        (8, 3, 224, 768, 16, 16, 0),
    )
    for (n, c, s, o, k, stride, pad), dtype in itertools.product(convs, (f32, bf16)):
        yield (
            f"conv {n},{c},{s},{o},{k},{stride},{pad} {dtype}",
            lambda a=(n, c, s, o, k, stride, pad), d=dtype: (
                lambda x, w, b: F.conv2d(x, w, b, a[5], a[6]),
                (rand(a[0], a[1], a[2], a[2], dtype=d), rand(a[3], a[1], a[4], a[4], dtype=d), rand(a[3], dtype=d)),
            ),
        )
    for shape in ((16, 64, 56, 56), (32, 64, 112, 112), (32, 512, 7, 7), (256, 128)):
        for dtype in (f32, bf16):

            def bn(shape=shape, dtype=dtype):
                m = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1]).cuda()
                return (lambda x: m(x)), (rand(*shape, dtype=dtype),)

            yield f"batch_norm {shape} {dtype}", bn
    yield "group_norm", lambda: (lambda x, w, b: F.group_norm(x, 8, w, b), (rand(8, 64, 32, 32), rand(64), rand(64)))
    yield "max_pool", lambda: (lambda x: F.max_pool2d(x, 3, 2, 1), (rand(16, 64, 112, 112),))
    yield "avg_pool", lambda: (lambda x: F.avg_pool2d(x, 2), (rand(16, 64, 56, 56),))
    yield "adaptive_avg_pool", lambda: (lambda x: F.adaptive_avg_pool2d(x, 1), (rand(16, 512, 7, 7),))
    yield "interpolate", lambda: (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (rand(4, 16, 64, 64),))
    for name in ("LSTM", "GRU", "RNN"):
        for layers in (1, 2):

            def rnn(name=name, layers=layers):
                m = getattr(nn, name)(256, 512, layers, batch_first=True).cuda()
                return (lambda x: m(x)[0]), (rand(8, 64, 256),)

            yield f"{name} {layers}", rnn
    yield "cumsum", lambda: (lambda x: x.cumsum(1), (rand(64, 10_000),))
    yield "cumsum 1d", lambda: (lambda x: x.cumsum(0), (rand(1_000_000),))
    yield "sort", lambda: (lambda x: x.sort(-1)[0], (rand(64, 10_000),))
    yield "sort 1d", lambda: (lambda x: x.sort()[0], (rand(1_000_000),))
    yield "topk", lambda: (lambda x: x.topk(10, -1)[0], (rand(64, 10_000),))
    yield "argmax", lambda: (lambda x: x.argmax(-1), (rand(4096, 5000, grad=False),))
    yield "max dim", lambda: (lambda x: x.max(-1)[0], (rand(4096, 5000),))
    yield "gather", lambda: (lambda x, i: x.gather(1, i), (rand(4096, 500), ints(500, 4096, 10)))
    yield "index 1", lambda: (lambda x, i: x[i], (rand(4096, 500), ints(4096, 2000)))
    yield "index 2", lambda: (lambda x, i, j: x[i, j], (rand(4096, 500), ints(4096, 2000), ints(500, 2000)))
    yield "index_select", lambda: (lambda x, i: x.index_select(0, i), (rand(4096, 500), ints(4096, 2000)))
    yield "bool index", lambda: (lambda x, i: x[i > 5], (rand(4096, 500), ints(10, 4096)))
    yield "nonzero", lambda: (lambda i: i.nonzero(), (ints(2, 100_000),))
    yield (
        "scatter_add",
        lambda: (
            lambda x, i: torch.zeros(500, 300, device="cuda").scatter_add(0, i, x),
            (rand(500, 300), ints(500, 500, 300)),
        ),
    )
    yield "unique", lambda: (lambda i: i.unique(), (ints(1000, 100_000),))
    yield "bincount", lambda: (lambda i: i.bincount(), (ints(1000, 100_000),))
    yield "randperm", lambda: (lambda: torch.randperm(100_000, device="cuda"), ())
    yield "multinomial", lambda: (lambda x: torch.multinomial(x, 5), (torch.rand(64, 1000, device="cuda"),))
    yield "cat", lambda: (lambda a, b: torch.cat([a, b], 1), (rand(512, 300), rand(512, 200)))
    yield "chunk add", lambda: (lambda a: torch.add(*a.chunk(2, 1)), (rand(512, 300),))
    yield (
        "linear noncontiguous",
        lambda: (lambda x, w, b: F.linear(x.transpose(0, 1), w, b), (rand(64, 128, 256), rand(512, 256), rand(512))),
    )
    yield "linear 2d", lambda: (F.linear, (rand(4096, 256), rand(512, 256), rand(512)))
    yield (
        "linear bf16",
        lambda: (F.linear, (rand(4096, 256, dtype=bf16), rand(512, 256, dtype=bf16), rand(512, dtype=bf16))),
    )
    yield "linear out 1", lambda: (F.linear, (rand(4096, 256), rand(1, 256), rand(1)))
    yield "linear one row", lambda: (F.linear, (rand(1, 256), rand(512, 256), rand(512)))
    yield "sum backward mm", lambda: (lambda x, w: (x @ w).sum(), (rand(512, 256), rand(256, 512)))
    yield "bmm expand", lambda: (lambda x, w: (x @ w).sum(), (rand(8, 512, 256), rand(256, 512)))
    yield (
        "einsum",
        lambda: (lambda x, w: torch.einsum("bhid,bhjd->bhij", x, w), (rand(4, 8, 128, 64), rand(4, 8, 128, 64))),
    )
    yield (
        "baddbmm",
        lambda: (lambda a, x, w: torch.baddbmm(a, x, w), (rand(8, 64, 64), rand(8, 64, 32), rand(8, 32, 64))),
    )
    yield "gelu", lambda: (lambda x: F.gelu(x), (rand(4096, 512),))
    yield "silu", lambda: (lambda x: F.silu(x), (rand(4096, 512),))
    yield "glu", lambda: (lambda x: F.glu(x), (rand(4096, 512),))
    yield "std", lambda: (lambda x: x.std(-1), (rand(4096, 512),))
    yield "var 0", lambda: (lambda x: x.var(0), (rand(8192, 512),))
    yield "logsumexp", lambda: (lambda x: x.logsumexp(-1), (rand(4096, 512),))
    yield "where", lambda: (lambda x: torch.where(x > 0, x, 0.0), (rand(4096, 512),))
    yield "clamp", lambda: (lambda x: x.clamp(-1, 1), (rand(4096, 512),))
    yield "pow", lambda: (lambda x: x**3, (rand(4096, 512),))
    yield "broadcast add", lambda: (lambda x, b: x + b, (rand(8, 1024, 768), rand(1024, 768)))
    yield "broadcast mul", lambda: (lambda x, b: x * b, (rand(8, 1024, 768), rand(768)))
    yield "broadcast mul 1", lambda: (lambda x, b: x * b, (rand(8, 1024, 768), rand(1)))
    yield "multi head", lambda: _multi_head()
    yield "to bf16", lambda: (lambda x: x.to(bf16), (rand(4096, 512),))
    yield "h2d int", lambda: (lambda: torch.zeros(1000, dtype=torch.int64).cuda(), ())
    yield "h2d cast", lambda: (lambda: torch.zeros(100_000, dtype=torch.float64).to("cuda", torch.float32), ())
    yield "isnan any", lambda: (lambda x: torch.isnan(x).any(), (rand(4096, 512, grad=False),))
    yield "allclose", lambda: (lambda x: torch.allclose(x, x), (rand(4096, 512, grad=False),))
    yield "print", lambda: (lambda x: repr(x), (rand(4096, 512, grad=False),))
    yield "svd", lambda: (lambda x: torch.linalg.svdvals(x), (rand(128, 64, grad=False),))


def _multi_head():
    m = nn.MultiheadAttention(512, 8, batch_first=True).cuda()
    return (lambda x: m(x, x, x, need_weights=False)[0]), (rand(8, 128, 512),)


def main(words: list[str] | None = None) -> int:
    """Run every probe and write a JSON document {probe: {"first forward": [["+", bytes], ...], ...}}."""
    options = parser("probes.kernels", __doc__)
    options.add_argument("file", help="where to write the JSON document")
    path = options.parse_args(words).file
    if no_gpu():
        return 2
    results: dict = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "probes": {},
    }
    for name, make in probes():
        try:
            results["probes"][name] = probe(make)
        except Exception as error:  # a kernel this card or release lacks is a row, too
            results["probes"][name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        torch.cuda.empty_cache()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file, separators=(",", ":"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
