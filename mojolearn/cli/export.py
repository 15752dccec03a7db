"""``mojolearn export``: a model for deployment, packed or not, and what the packing costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mojolearn.cli._common import (
    UsageError,
    add_command,
    bytes_text,
    checkpoint_file,
    emit,
    file_facts,
    load_model,
    progress,
)
from mojolearn.cli.evaluate import evaluate

EXAMPLES = """\
  mojolearn export run --format int8 --out small.ckpt
  mojolearn export run --format bfloat16 --out model.safetensors
  mojolearn export run --format int8 --out small.ckpt --keep 'embed.*,norm_f.weight'
  mojolearn export run --format int8 --out small.ckpt --text book.txt     bits per byte before and after
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "export",
        run,
        "write a model for deployment",
        EXAMPLES,
        description="Write a model for deployment: float32, bfloat16 or int8, as an archive or as safetensors.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a run or checkpoint")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write; .safetensors chooses that kind")
    parser.add_argument("--format", choices=("float32", "bfloat16", "int8"), default="int8", help="of matrices (int8)")
    parser.add_argument("--keep", default="", metavar="NAMES", help="what stays float32: names or patterns, by comma")
    parser.add_argument("--text", action="append", metavar="TEXT", help="measure both models on this text")
    parser.add_argument("--windows", type=int, default=128, metavar="N", help="rows of that text, 0 for all (128)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (default: the CPUs of this process)")


def run(args: argparse.Namespace) -> int:
    from mojolearn.export import export

    source = checkpoint_file(args.model)
    keep = [name.strip() for name in args.keep.split(",") if name.strip()]
    if source.resolve() == Path(args.out).resolve():
        raise UsageError(f"--out {args.out} is the file that is exported")
    with progress(4 * file_facts(source)["num_parameters"], "exporting", "B", unit_scale=True) as bar:
        report = export(source, args.out, format=args.format, keep=keep, progress=lambda done: bar.update(done - bar.n))
    if args.text:
        before, after = load_model(str(source)), load_model(args.out)
        seq_len = before.run.get("settings", {}).get("seq_len", 256)
        report["evaluation"] = {
            name: evaluate(one, args.text, seq_len=seq_len, windows=args.windows)
            for name, one in (("before", before), ("after", after))
        }
    emit(args, report, _text(report))
    return 0


def _text(report: dict[str, Any]) -> str:
    lines = [f"{'tensor':44}{'format':10}{'bytes':>12}{'rms':>11}{'rms error':>11}{'max error':>11}"]
    lines += [
        f"{one['name']:44}{one['format']:10}{one['nbytes']:12,}{one['rms']:11.3g}{one['rms_error']:11.3g}"
        f"{one['max_error']:11.3g}"
        for one in report["tensors"]
    ]
    lines.append(f"relative error of all weights: {report['relative_error']:.3g}")
    if "evaluation" in report:
        for name, result in report["evaluation"].items():
            bits = "" if result["bits_per_byte"] is None else f", {result['bits_per_byte']:.4f} bits per byte"
            lines.append(f"{name} packing: loss {result['loss']:.4f}{bits} on {result['tokens']:,} tokens")
    lines.append(
        f"{report['out']}: {bytes_text(report['file_size'])}; weights {bytes_text(report['weight_bytes'])}, "
        f"as float32 {bytes_text(report['float32_bytes'])}"
    )
    return "\n".join(lines)
