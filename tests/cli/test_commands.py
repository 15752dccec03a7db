"""The other commands, on a small trained run."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from cli_process import ENVIRONMENT, ROOT, SMALL, command, start

import mojolearn
from mojolearn import checkpoint

# what an installed `mojolearn` does
SCRIPT = "import sys; sys.argv[0] = '/usr/bin/mojolearn'; from mojolearn.cli import main; sys.exit(main())"


def test_generate_writes_what_the_library_draws(trained, run):
    model = mojolearn.SambaInference.from_checkpoint(trained / "best.ckpt")
    wanted = bytes(mojolearn.generate(model, "1 plus", 30, temperature=0.8, seed=4))
    options = ("--prompt", "1 plus", "--max-new-tokens", 30, "--seed", 4)
    status, out, _ = run("generate", trained, *options)
    assert status == 0
    assert out == "1 plus" + wanted.decode("utf-8", "replace") + "\n"
    assert run("generate", trained, *options, "--no-echo")[1] == wanted.decode("utf-8", "replace") + "\n"
    assert run("generate", trained / "best.ckpt", *options)[1] == out


def test_generate_many_as_json(trained, run):
    options = ("--max-new-tokens", 12, "--temperature", 0, "--json")
    status, out, _ = run("generate", trained, "--prompt", "3 plus 4", "--prompt", "x", *options)
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [row["prompt"] for row in rows] == ["3 plus 4", "x"]
    for row in rows:
        assert json.loads(run("generate", trained, "--prompt", row["prompt"], *options)[1]) == row
        assert len(row["tokens"]) == 12


def test_generate_reads_a_prompt_from_standard_input(trained):
    process = start("generate", trained, "--prompt", "-", "--max-new-tokens", 5, stdin=subprocess.PIPE)
    out, err = process.communicate("7 plus 8 makes ", timeout=60)
    assert process.returncode == 0
    assert out.startswith("7 plus 8 makes ")
    assert err == ""


def test_generate_stops_at_a_text(trained, run):
    options = ("--prompt", "1 plus 2", "--max-new-tokens", 200, "--temperature", 0.1, "--stop", ".", "--no-echo")
    status, out, _ = run("generate", trained, *options)
    assert status == 0
    assert out.count(".") <= 1


def test_output_that_nobody_reads_is_no_fault(trained):
    process = subprocess.Popen(
        " ".join(command("generate", trained, "--prompt", "a", "--max-new-tokens", "3000")) + " | head -c 5",
        shell=True,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=60)
    assert len(out) == 5
    assert err == b""


def test_eval_equals_the_log_probabilities_of_the_held_out_text(trained, run):
    model = mojolearn.SambaInference.from_checkpoint(trained / "best.ckpt")
    settings = checkpoint.inspect(trained / "best.ckpt")["extra"]["settings"]
    data = mojolearn.data.TokenDataset(settings["paths"], 1, 32, split="valid")
    rows = [np.concatenate([x[0], y[0, -1:]]) for x, y in data]
    wanted = -np.mean([model.token_logprobs(row[None]).astype(np.float64) for row in rows])
    status, out, _ = run("eval", trained, "--json", "--batch-size", 5)
    result = json.loads(out)
    assert status == 0
    assert result["loss"] == pytest.approx(wanted, rel=1e-12)
    assert result["bits_per_byte"] == pytest.approx(wanted / math.log(2), rel=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-12)
    assert result["tokens"] == 32 * len(rows)
    assert f"{result['bits_per_byte']:.4f} bits per byte" in run("eval", trained)[1]


def test_eval_of_another_text_takes_all_of_it(trained, tmp_path, run):
    (tmp_path / "other.txt").write_text("17 plus 4 makes 21.\n" * 40)
    status, out, _ = run("eval", trained / "best.ckpt", tmp_path / "other.txt", "--json")
    assert status == 0
    result = json.loads(out)
    assert (result["split"], result["tokens"]) == ("all", 32 * (799 // 32))


def test_inspect_says_what_is_inside(trained, run):
    status, out, _ = run("inspect", trained)
    assert status == 0
    for part in ("training, layout archive", "width 32", "mamba3, attention", "with its tokenizer"):
        assert (part in out) == (part != "with its tokenizer")
    status, out, _ = run("inspect", trained / "best.ckpt", "--json", "--verify")
    facts = json.loads(out)
    assert status == 0
    assert facts["verified"] is True
    assert facts["config"]["d_model"] == 32
    status, out, _ = run("inspect", trained, "--tensors")
    assert "layers.0.in_proj.weight" in out


def test_inspect_names_the_profile_of_a_deterministic_run(text, tmp_path, run):
    options = (*SMALL, "--steps", 1, "--numeric-mode", "deterministic")
    assert run("train", text, "--out", tmp_path / "run", *options)[0] == 0
    status, out, _ = run("inspect", tmp_path / "run")
    assert status == 0
    assert "mode      deterministic" in out
    assert "mojolearn.deterministic.v1" in out


def test_inspect_draws_weights(trained, tmp_path, run):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "weights.png"
    status, _, err = run("inspect", trained, "--plot", picture)
    assert status == 0
    assert str(picture) in err
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_draws_one_or_several_runs(trained, tmp_path, run):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    status, out, _ = run("plot", trained, "--out", picture)
    assert (status, out) == (0, f"{picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    drawing = tmp_path / "both.svg"
    assert run("plot", trained, trained, "--out", drawing)[0] == 0
    assert "<svg" in drawing.read_text()


@pytest.mark.parametrize("name", ["small.ckpt", "small.safetensors"])
def test_export_packs_and_says_what_it_costs(name, trained, text, tmp_path, run):
    if name.endswith(".safetensors"):
        pytest.importorskip("safetensors")
    out_file = tmp_path / name
    options = ("--format", "int8", "--out", out_file, "--keep", "embed.*", "--text", text / "a.txt", "--json")
    status, out, _ = run("export", trained, *options)
    report = json.loads(out)
    assert status == 0
    formats = {one["name"]: one["format"] for one in report["tensors"]}
    assert formats["embed.weight"] == "float32"
    assert formats["layers.0.in_proj.weight"] == "int8"

    settings = {"seq_len": 32, "batch_size": 1, "valid_fraction": 0.0}
    data = mojolearn.data.TokenDataset(text / "a.txt", **settings)
    rows = np.stack([data.tokens(i * 32, i * 32 + 33) for i in range(128)])
    for name, file in (("before", trained / "best.ckpt"), ("after", out_file)):
        load = mojolearn.SambaInference.from_safetensors if file.suffix == ".safetensors" else (
            mojolearn.SambaInference.from_checkpoint
        )
        wanted = -load(file).token_logprobs(rows).astype(np.float64).mean() / math.log(2)
        assert report["evaluation"][name]["bits_per_byte"] == pytest.approx(wanted, rel=1e-12)

    assert run("generate", out_file, "--max-new-tokens", 5)[0] == 0
    status, out, _ = run("inspect", out_file, "--verify")
    assert status == 0
    assert "int8" in out
    assert "all checked" in out
    assert "before packing: loss" in run("export", trained, *options[:-1])[1]


def test_bench_reports_speeds(run):
    status, out, _ = run("bench", "--seconds", "0.01", "--json")
    result = json.loads(out)
    assert status == 0
    assert set(result["tokens_per_second"]) == {"forward", "train", "decode"}
    assert all(speed > 0 for speed in result["tokens_per_second"].values())


def test_version_and_help(run):
    status, out, _ = run("--version")
    assert status == 0
    assert out.startswith(f"mojolearn {mojolearn.__version__}\n")
    for name in ("train", "eval", "generate", "export", "inspect", "verify", "bench", "plot"):
        status, out, _ = run(name, "--help")
        assert status == 0
        assert "examples:" in out
        assert f"mojolearn {name}" in out
    status, out, err = run()
    assert (status, out) == (2, "")
    assert "COMMAND" in err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["inspect", "{root}/none.ckpt"], 1, "no such file or folder"),
        (["inspect", "{root}"], 1, "a folder without checkpoints"),
        (["inspect", "{root}/broken.ckpt"], 1, "broken.ckpt"),
        (["generate", "{run}", "--max-new-tokens", "0"], 2, "max_new_tokens must be at least 1"),
        (["generate", "{run}", "--prompt", ""], 2, "prompt[0] must hold at least one token"),
        (["generate", "{run}", "--temperature", "-1"], 2, "temperature must be at least 0"),
        (["generate", "{run}", "--top-k", "0"], 2, "top_k must be at least 1, got 0"),
        (["generate", "{run}", "--top-p", "2"], 2, "top_p must be at most 1"),
        (["generate", "{run}", "--threads", "0"], 2, "threads must be at least 1, got 0"),
        (["bench", "--threads", "1000"], 2, "threads must be at most 256, got 1000"),
        (["eval", "{run}", "{root}/none.txt"], 1, "neither a file nor a folder"),
        (["plot", "{root}"], 1, "metrics.jsonl: no such file"),
        (["plot", "{run}", "--out", "{root}/picture.xyz"], 1, "xyz"),
    ],
)
def test_refusals_are_one_line(arguments, status, message, trained, tmp_path, run):
    (tmp_path / "broken.ckpt").write_bytes(b"not a checkpoint")
    arguments = [argument.format(run=trained, root=tmp_path) for argument in arguments]
    got, _, err = run(*arguments)
    assert got == status
    assert len(err.splitlines()) == 1
    assert err.startswith(f"mojolearn {arguments[0]}: error: ")
    assert message in err
    assert run(*arguments, "--debug")[2].startswith("Traceback")


def test_wrong_flags_are_usage_errors(run):
    for arguments in (["train"], ["nothing"], ["generate"], ["inspect", "x", "--wrong"]):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert "usage:" in err


def test_the_program_starts_without_heavy_imports():
    code = "import sys, mojolearn.cli; print([m for m in ('matplotlib', 'tokenizers', 'tqdm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("start_of_line", [["-m", "mojolearn"], ["-c", SCRIPT]], ids=["module", "script"])
@pytest.mark.parametrize(
    "name, value, text",
    [
        ("MOJOLEARN_ISA", "mmx", "MOJOLEARN_ISA is 'mmx'; wanted one of baseline, avx2, avx512"),
        ("MOJOLEARN_NUM_THREADS", "many", "MOJOLEARN_NUM_THREADS must be an integer, got 'many'"),
        ("MOJOLEARN_NUM_THREADS", "0", "MOJOLEARN_NUM_THREADS must be at least 1, got 0"),
        ("MOJOLEARN_NUMERIC_MODE", "exact", "MOJOLEARN_NUMERIC_MODE must be one of"),
    ],
)
def test_a_wrong_environment_is_one_line(start_of_line, name, value, text):
    def run(*arguments):
        line = [sys.executable, *start_of_line, *arguments]
        done = subprocess.run(line, env={**ENVIRONMENT, name: value}, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    for arguments in (["--version"], ["inspect", "no-such-file"]):
        (line,) = run(*arguments).splitlines()
        assert "error: " + text in line and line.startswith("mojolearn")
    lines = run("inspect", "no-such-file", "--debug").splitlines()
    assert lines[0].startswith("Traceback") and text in lines[-1]


def test_a_wrong_environment_is_an_exception_for_programs():
    line = [sys.executable, "-c", "import mojolearn"]
    done = subprocess.run(
        line, env={**ENVIRONMENT, "MOJOLEARN_ISA": "mmx"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("ValueError: MOJOLEARN_ISA is 'mmx'")
