"""``mojolearn generate``: text from a model, as it is drawn."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from mojolearn.cli._common import add_command, add_numeric_options, given_values, load_model, note

EXAMPLES = """\
  mojolearn generate run --prompt "def main("
  mojolearn generate run --prompt "Once" --temperature 0      the most likely token each time
  mojolearn generate run --prompt A --prompt B --json         several prompts at once
  echo "import os" | mojolearn generate run --prompt -
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "generate", run, "continue a prompt", EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="folder of a run, checkpoint or exported file")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what to continue, - for standard input (a line feed)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to write (256)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 for greedy (0.8)")
    parser.add_argument("--top-k", type=int, metavar="N", help="draw among the N most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="X", help="draw among the most likely that reach X together")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 avoids old tokens")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end after this text (may be given again)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draws (0)")
    parser.add_argument("--no-echo", action="store_true", help="do not print the prompt before its continuation")
    add_numeric_options(parser)


def run(args: argparse.Namespace) -> int:
    from mojolearn.generation import generate

    prompts = [sys.stdin.read() if text == "-" else text for text in args.prompt or ["\n"]]
    loaded = load_model(args.model, args.numeric_mode)
    ids = [loaded.text.encode(prompt) for prompt in prompts]
    with given_values():
        tokens = generate(
            loaded.model,
            ids,
            args.max_new_tokens,
            args.temperature,
            args.top_k,
            args.top_p,
            args.repetition_penalty,
            stop=[loaded.text.encode(text) for text in args.stop or ()],
            seed=args.seed,
        )
    streaming = len(prompts) == 1 and not args.json
    if streaming and not args.no_echo:
        _write(prompts[0])

    started = time.perf_counter()
    drawn: list[list[int]] = [[] for _ in prompts]
    decoders = [loaded.text.decoder() for _ in prompts]
    texts = ["" for _ in prompts]
    for batch in tokens:
        for i, token in enumerate(batch.tolist()):
            if token >= 0:
                drawn[i].append(token)
                piece = decoders[i](token, len(drawn[i]) == args.max_new_tokens)
                texts[i] += piece
                if streaming:
                    _write(piece)
    seconds = time.perf_counter() - started

    if streaming:
        _write("\n")
    for prompt, text, row in zip(prompts, texts, drawn, strict=True):
        if args.json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": row}))
        elif not streaming:
            print(f"{'' if args.no_echo else prompt}{text}\n")
    if sys.stderr.isatty():
        count = sum(map(len, drawn))
        note(f"{count} tokens in {seconds:.2f} s ({count / max(seconds, 1e-9):.0f} tokens/s, prompts included)")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
