"""One file of a sharded model, and back: the file of DDP's lesson, and safetensors."""

import json
import re
from argparse import Namespace

import fully_sharded_export
import pytest
import torch
from launch import DIGITS, launched, one_line, ranks, run
from safetensors.torch import load_file, save_file
from torch import nn

from common.models import MODELS

LESSON = "fully_sharded_export"
SHORT = (*DIGITS, "--batch_size", 120, "--double")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Checkpoints of the DDP lesson, which has the numbers of one process, by their epoch."""
    folder = tmp_path_factory.mktemp("ddp")
    paths = {}
    for count in (1, 2, 3):
        paths[count] = folder / f"ddp{count}.pt"
        flags = (*SHORT, "--epochs", count, "-s", paths[count])
        run("distributed_data_parallel", *flags, processes=1)
    return paths


def assert_same_state(path, right):
    """Check that a plain model and Adam can load a file, with the state of another one."""
    found = torch.load(path, weights_only=True)
    right = torch.load(right, weights_only=True)
    assert found.keys() == right.keys() == {"model", "optimizer", "epoch", "args"}
    assert (found["epoch"], found["args"]["batch_size"]) == (right["epoch"], 120)
    model = MODELS["mlp"]().double()
    model.load_state_dict(found["model"])
    torch.testing.assert_close(model.state_dict(), right["model"], atol=1e-12, rtol=0)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["eps"] == 1e-6
    state = right["optimizer"]["state"]
    assert len(state) == 8
    torch.testing.assert_close(optimizer.state_dict()["state"], state, atol=1e-12, rtol=0)


def test_what_is_exported(tmp_path):
    """Floating-point buffers, too; a table that two layers share once. safetensors refuses two."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    found = fully_sharded_export.exported_shards(model, Namespace(model="own"))
    save_file(found, tmp_path / "model.safetensors")
    left_out = {"1.num_batches_tracked", "2.weight"}
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys() - left_out


def test_from_one_file_to_another(change, ddp, tmp_path):
    """Three ranks begin with DDP's file, and two with theirs. Only rank 0 reads and writes it."""
    read = "        state = torch.load("
    copy = change(LESSON, (read, f"        assert dist.get_rank() == 0\n{read}"))
    begin = ddp[1]
    for count, processes in ((2, 3), (3, 2)):
        file = tmp_path / f"c{count}.pt"
        flags = (*SHORT, "--load", begin, "-s", file, "--epochs", count)
        out = run(copy, *flags, processes=processes).stdout
        assert f"{begin}: {count - 1} of {count} epochs are done" in out
        assert re.findall(r"^epoch (\d)", out, re.M) == [str(count)]
        assert_same_state(file, ddp[count])
        begin = file
    assert sorted(path.name for path in tmp_path.glob("c?.pt*")) == ["c2.pt", "c3.pt"]


# What transformers calls the layers of a Llama model, in their order.
OF_A_BLOCK = """input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj
    post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"""
BLOCKS = [f"model.layers.{block}.{name}" for block in (0, 1) for name in OF_A_BLOCK.split()]
LLAMA = ["model.embed_tokens", *BLOCKS, "model.norm", "lm_head"]


def test_an_export(tmp_path):
    """safetensors alone reads what three ranks have written, and two ranks resume from it.

    Without a learning rate, these end with the same parameters.
    """
    text = ("--model", "language", "--batch_size", 120, "--epochs", 1)
    few = {"DOCUMENTS": "40"}
    folder, file = tmp_path / "exported", tmp_path / "c.pt"
    run(LESSON, *text, "--export", folder, "-s", file, processes=3, env=few)
    right = torch.load(file, weights_only=True)["model"]
    found = load_file(folder / "model-00001-of-00001.safetensors")
    assert set(found) == {f"{name}.weight" for name in LLAMA}
    tensors = [found[f"{name}.weight"] for name in LLAMA]
    torch.testing.assert_close(tensors, [*right.values()], atol=0, rtol=0)

    config = json.loads((folder / "config.json").read_text())
    assert found["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert found[f"{BLOCKS[-2]}.weight"].shape[0] == config["intermediate_size"]
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    assert (*heads, config["num_hidden_layers"]) == (4, 2, 2)

    end, *_ = [job.wait() for job in ranks(LESSON, *SHORT, "--load", folder, processes=1)]
    assert end.returncode == 1 and "Missing key in checkpoint" in end.stderr  # of the MLP
    out = run(LESSON, *text, "--lr", 0, "--load", folder, "-s", file, processes=2, env=few).stdout
    assert "exported: 0 of 1 epochs are done" in out
    again = torch.load(file, weights_only=True)["model"]
    torch.testing.assert_close(again, right, atol=0, rtol=0)


def test_an_export_that_cannot_work(tmp_path, main, monkeypatch):
    """Status 2 and one line: what to install, or that the folder may have the shards of others."""
    env = launched()
    with monkeypatch.context() as without:
        without.setattr("fully_sharded_export.find_spec", lambda name: None)
        for flag in ("--export", "--load"):
            one_line(main(LESSON, *SHORT, flag, tmp_path, env=env), "pip install safetensors")
    one_line(main(LESSON, *SHORT, "--load", tmp_path, env=env), "no export", "--run_dir")
    (tmp_path / "sharded").mkdir()
    done = main(LESSON, *SHORT, "--export", tmp_path, env=env)
    one_line(done, f"--export {tmp_path}", "not empty")
