"""``mojolearn inspect``: what is in a checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from mojolearn.cli._common import add_command, bytes_text, checkpoint_file, emit, file_facts, load_inference, note

EXAMPLES = """\
  mojolearn inspect run                      the best checkpoint of a run
  mojolearn inspect run/step-00001000.ckpt --verify
  mojolearn inspect small.ckpt --tensors
  mojolearn inspect run --plot weights.png   distributions of weights and of their rounding errors
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "inspect",
        run,
        "say what is in a checkpoint",
        EXAMPLES,
        description="Say what is in a checkpoint. The arrays are not loaded, except with --verify and --plot.",
    )
    parser.add_argument("file", metavar="FILE", help="checkpoint, exported archive or folder of a run")
    parser.add_argument("--verify", action="store_true", help="check every byte")
    parser.add_argument("--tensors", action="store_true", help="list the tensors")
    parser.add_argument("--plot", metavar="FILE", help="draw the distributions of weights and rounding errors")


def run(args: argparse.Namespace) -> int:
    path = checkpoint_file(args.file)
    facts = file_facts(path, verify=args.verify)
    emit(args, {"file": str(path), **facts}, f"{path}\n{_text(facts, args.tensors)}")
    if args.plot:
        from mojolearn.plotting import plot_weights

        note(f"drawn: {plot_weights(load_inference(path).parameters(), args.plot)}")
    return 0


def _text(facts: dict[str, Any], tensors: bool) -> str:
    config = facts["config"]
    kinds = ", ".join(config["layers"])
    rows = [
        ("kind", f"{facts['kind']}, layout {facts['layout']}, {bytes_text(facts['file_size'])}"),
        ("model", f"{facts['num_parameters']:,} parameters, width {config['d_model']}, {config['vocab']:,} tokens"),
        ("layers", kinds),
        ("weights", facts["weight_format"]),
        ("step", None if facts.get("step") is None else f"{facts['step']:,}"),
        ("mode", facts.get("numeric_mode")),
        ("profile", _pairs(facts.get("deterministic_profile"))),
        ("optimizer", _pairs(facts.get("optimizer"))),
        ("schedule", _pairs(facts.get("schedule"))),
        ("random", _pairs(facts.get("rng"))),
        ("extra", _extra_text(facts["extra"])),
        ("bytes", "all checked" if facts["verified"] else "not checked (--verify)"),
        ("sha256", facts.get("sha256")),
    ]
    lines = [f"{name:10}{value}" for name, value in rows if value]
    if tensors:
        lines += [f"  {one['name']:44}{' x '.join(map(str, one['shape']))}" for one in facts["tensors"]]
    for array in facts.get("arrays", ()):
        if tensors or facts["kind"] == "training":  # the state's four arrays; an exported file has one for each tensor
            size = f"{array['dtype']} {bytes_text(array['nbytes'])}, {bytes_text(array['stored'])} stored"
            lines.append(f"  {array['name']:16}{size}  {(array['digest'] or '')[:16]}")
    return "\n".join(lines)


def _pairs(values: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items() if value is not None)


def _extra_text(extra: Any) -> str:
    """The caller's own object in short: a run says how far it has come, anything else its keys."""
    if not isinstance(extra, dict) or not extra:
        return ""
    parts = []
    data = extra.get("data")
    if isinstance(data, dict) and "epoch" in data:
        parts.append(f"epoch {data['epoch']}, window {data['window']}")
    if isinstance(extra.get("best_loss"), float):
        parts.append(f"best held-out loss {extra['best_loss']:.4f}")
    if extra.get("tokenizer"):
        parts.append("with its tokenizer")
    return "; ".join(parts) or ", ".join(map(str, extra))
