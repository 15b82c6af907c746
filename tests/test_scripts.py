"""Training loops of many kinds, unchanged, on a card that is not here: each runs, or one line says why it cannot."""

import json
import sys
from pathlib import Path

import pytest

from gpt2.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
RUN = ("contrastive", "data_parallel", "gradient_penalty", "guards", "momentum_contrast", "on_meta", "per_sample",
       "resume", "rollout", "segmentation")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def simulate(tmp_path, monkeypatch, capfd):
    """Runs a script in this process: (status, its standard output, standard error, JSON)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(script):
        status = main(["simulate", "--gpu", "H200", "--torch", "2.11.0", "--json", "answer.json", str(script)])
        return status, *capfd.readouterr(), json.loads(Path("answer.json").read_text())

    return run


@pytest.mark.parametrize("name", RUN)
def test_runs_and_knows_its_peaks(simulate, name):
    status, out, err, found = simulate(SCRIPTS / f"{name}.py")
    assert status == 0 and found["fits"] and found["error"] is None, err
    allocated, reserved = map(int, out.rpartition("peak ")[2].split())
    assert allocated <= found["peak_allocated_bytes"] and reserved <= found["peak_reserved_bytes"]
    assert found["per_step"][-1]["step"] >= 2 or name == "per_sample"  # it has no optimizer


SETUP = "import torch\nfrom torch import nn\nnet = nn.Linear(8, 8).cuda()\nx = torch.randn(4, 8, device='cuda')\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.distributed.init_process_group('nccl')", "torch.distributed on the GPU is not simulated: one process"),
        ("nn.parallel.DistributedDataParallel(net)", "torch.distributed on the GPU is not simulated"),
        ("nn.CTCLoss()(x[:, None], torch.ones(1, 2).long().cuda(), torch.tensor([4]), torch.tensor([2]))",
         "torch.ctc_loss is not simulated: PyTorch cannot tell its results without values"),
        ("best = x if net(x).sum().item() < 3 else None", "a comparison or a branch needs the value of a tensor"),
        ("json.dumps({'better': net(x).sum().item() > 3})", "a comparison or a branch needs the value of a tensor"),
        ("statistics.median([net(x).sum().item(), net(x).sum().item()])", "a comparison or a branch needs the value"),
    ],
)
def test_what_is_not_simulated_is_one_line_that_names_the_programs(simulate, tmp_path, line, said):
    path = tmp_path / "train.py"
    path.write_text(f"import json, statistics\n{SETUP}{line}\n")
    status, out, err, found = simulate(path)
    assert status == 1 and found["fits"] is None and "Traceback" not in err
    assert err.startswith(f"error: {path}:6") and said in err.splitlines()[0]


def test_a_compiled_model_is_run_as_it_is_and_that_is_said(simulate, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"{SETUP}model = torch.compile(net)\nsquare = torch.compile(mode='max-autotune')(lambda x: x * x)\n"
                    "square(model(x)).sum().backward()\n"
                    "print(len(model._orig_mod.state_dict()), len(net.state_dict()))\n")
    with pytest.warns(UserWarning, match="torch.compile is simulated as eager"):
        status, out, err, _ = simulate(path)
    assert (status, out) == (0, "2 2\n"), err


def test_files_have_shapes_and_holes(simulate, tmp_path):
    import torch
    from safetensors.torch import load_file

    path = tmp_path / "train.py"
    path.write_text(f"{SETUP}from safetensors.torch import save_file\nbig = torch.randn(4096, 4096, device='cuda')\n"
                    "torch.save({'big': big, 'count': torch.arange(3).cuda(), 'host': torch.ones(2)}, 'a.pt')\n"
                    "save_file({'big': big, 'count': torch.arange(3).cuda()}, 'a.safetensors', {'format': 'pt'})\n")
    with pytest.warns(UserWarning, match="it has zeros for contents nobody knows"):
        assert simulate(path)[0] == 0
    for name in ("a.pt", "a.safetensors"):
        facts = (tmp_path / name).stat()
        assert facts.st_size > 2**26 and facts.st_blocks * 512 < 2**16
    saved = torch.load(tmp_path / "a.pt", map_location="cpu")
    assert saved["big"].shape == (4096, 4096) and not saved["big"].any()
    assert saved["count"].tolist() == [0, 1, 2] and saved["host"].tolist() == [1, 1]
    assert load_file(tmp_path / "a.safetensors")["big"].shape == (4096, 4096)


def test_a_log_of_unknown_numbers_is_json(simulate, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import copy, json\n{SETUP}log = [dict(loss=copy.deepcopy(net(x).sum().item()))]\n"
                    "loss = log[0]['loss']\nassert loss == loss and not loss != loss and loss != float('inf')\n"
                    "print(json.dumps(log, indent=1))\n")
    status, out, err, _ = simulate(path)
    assert status == 0 and str(json.loads(out)) == "[{'loss': nan}]", err


def test_a_transformers_model_is_saved_and_loaded(simulate, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=32)\n"
        "model = GPT2LMHeadModel(config)\nmodel.save_pretrained('host')\nmodel.cuda().save_pretrained('card')\n"
        "for name in ('host', 'card'):\n    before = torch.cuda.memory_allocated()\n"
        "    loaded = GPT2LMHeadModel.from_pretrained(name).cuda()\n"
        "    assert loaded.lm_head.weight is loaded.transformer.wte.weight\n"
        "    print(torch.cuda.memory_allocated() - before == before, os.path.getsize(f'{name}/model.safetensors'))\n"
        "    del loaded\n")
    status, out, err, _ = simulate(path)
    assert status == 0, err
    first, second = out.splitlines()
    assert first == second and first.startswith("True ")
