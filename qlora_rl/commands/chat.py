"""`qlora-rl chat`: talk to what a run has trained."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from qlora_rl.commands.codes import BASE, COUNT, NOT_NEGATIVE, SHARE, UsageError, existing
from qlora_rl.errors import ConfigConflictError, QloraRLError, raise_where

_HELP = "/new starts over, /image FILE shows an image, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"


def add(commands: Any) -> None:
    """The command's arguments."""
    chat = commands.add_parser(
        "chat", parents=[BASE], help="chat with a trained policy; from a pipe: each line gets an answer"
    )
    chat.add_argument(
        "trained", type=existing, metavar="RUN", help="run directory, or a checkpoint or exported adapter in it"
    )
    chat.add_argument("--base-only", action="store_true", help="use the base without the adapter, for comparison")
    chat.add_argument(
        "--teacher", action="store_true", help="of a distillation: also the teacher's answer, with what it read then"
    )
    chat.add_argument("--system", metavar="TEXT", help="system message (default: the run's; '' for none)")
    chat.add_argument(
        "--max-tokens",
        type=COUNT,
        metavar="N",
        help="longest answer, in tokens (default: as in the run's training; 256 where it sampled nothing)",
    )
    chat.add_argument(
        "--temperature", type=NOT_NEGATIVE, default=0.7, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    chat.add_argument("--top-p", type=SHARE, default=1.0, metavar="P", help="(default: %(default)s)")
    chat.add_argument("--seed", type=int, metavar="N", help="sampling seed (default: random)")
    chat.add_argument(
        "--image",
        type=_image,
        action="append",
        default=[],
        metavar="FILE",
        help="show an image with the first message, or from a pipe with each line; may be repeated",
    )
    chat.add_argument(
        "--raw",
        action="store_true",
        help="continue the text as it is, without chat template, prompt_template and history",
    )
    chat.add_argument(
        "--json", action="store_true", help="from a pipe: one JSON object for each line, with prompt and answer"
    )
    chat.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """A talk in a terminal; from a pipe each line is a talk of its own."""
    raise_where(
        "chatting",
        [
            (arguments.system and arguments.raw, "--system with --raw, which uses no messages. Leave one of them out."),
            (
                arguments.teacher and arguments.base_only,
                "--teacher with --base-only, which is no student. Leave one of them out.",
            ),
        ],
        UsageError,
    )
    talks, title = _talks(arguments)
    if sys.stdin.isatty():
        _in_terminal(talks, title, arguments.image)
    else:
        _from_pipe(talks, arguments.image, as_json=arguments.json)
    return 0


def _talks(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Who answers, by name, and what a talk begins with; one that answers alone has no name."""
    from qlora_rl.engine.loading import loading

    with loading("qlora_rl.adapter.initialization", quietly=True):
        from qlora_rl.inference.chat import Conversation
        from qlora_rl.inference.trained import open_trained

    trained = open_trained(arguments.trained, base=arguments.base)
    talk = Conversation(
        trained,
        is_base_only=arguments.base_only,
        system=arguments.system,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        uses_template=False if arguments.raw else None,
    )
    if arguments.system and not talk.uses_template:
        raise ConfigConflictError("chatting: --system, and the base has no chat template. Leave it out.")
    title = f"{'base' if arguments.base_only else trained.name} on {trained.base.path.name}"
    if not arguments.teacher:
        return {"": talk}, title
    teacher = talk.with_teacher()
    if arguments.system is not None and trained.config["teacher"].get("reads"):
        print("the teacher reads what it read in training, without --system", file=sys.stderr)
    if teacher.lacks:
        print(f"the teacher reads what you say alone; in training it also read {teacher.lacks}", file=sys.stderr)
    return {"student": talk, "teacher": teacher}, title


def _from_pipe(talks: dict[str, Any], images: list[Any], *, as_json: bool) -> None:
    """Answer each line of stdin, by all of `talks`."""
    answers, cut_off = 0, 0
    for line in sys.stdin:
        text = line.rstrip("\n")
        if not as_json:  # which answer is whose; on stderr, so that a file holds answers alone
            print(f"> {text}", file=sys.stderr, flush=True)
        told: dict[str, Any] = {"prompt": text}
        for who, talk in talks.items():
            talk.forget()
            said, name = "".join(talk.answer(text, images)), f"{who}_" * (who == "teacher")
            is_cut = talk.cut_off_after is not None
            answers, cut_off = answers + 1, cut_off + is_cut
            told |= {f"{name}answer": said, f"{name}cut_off": is_cut}
            if not as_json:
                print(f"{who}: {said}" if who else said, flush=True)
        if as_json:
            print(json.dumps(told, ensure_ascii=False), flush=True)
    if cut_off:
        longest = next(iter(talks.values())).max_tokens
        print(
            f"{cut_off} of {answers} answers were cut off after {longest} tokens, or at the model's last position; "
            "--max-tokens sets the limit",
            file=sys.stderr,
        )


def _in_terminal(talks: dict[str, Any], title: str, first_images: list[Any]) -> None:
    """Ask and answer until the end of the input."""
    import readline  # noqa: F401  (input() gets a history)

    images = list(first_images)
    print(f"{title}; {_HELP}")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        if text.strip() == "/quit":
            return
        if text.strip() == "/new":
            for talk in talks.values():
                talk.forget()
            continue
        try:
            if text.startswith("/image "):
                images.append(_image(text.removeprefix("/image ").strip()))
                continue
            _answer(talks, text, images)
            images = []
        except KeyboardInterrupt:
            pass
        except (QloraRLError, argparse.ArgumentTypeError) as error:
            print(error, end="")
        print()


def _answer(talks: dict[str, Any], text: str, images: list[Any]) -> None:
    """Print the answers while they are sampled."""
    for who, talk in talks.items():
        print("\n" * (who == "teacher") + f"{who}: " * bool(who), end="", flush=True)
        for piece in talk.answer(text, images):
            print(piece, end="", flush=True)
        if talk.cut_off_after is not None:
            is_at_the_end = talk.cut_off_after < talk.max_tokens
            why = ", at the model's last position" if is_at_the_end else "; --max-tokens allows more"
            print(f"\n[cut off after {talk.cut_off_after} tokens{why}]", end="")


def _image(path: str) -> Any:
    from qlora_rl.image_io import read_image

    try:
        return read_image(path)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
