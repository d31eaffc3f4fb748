"""`qlora-rl verify`: does vLLM hold the same base?"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import AS_JSON


def add(commands: Any) -> None:
    """The command's arguments."""
    verify = commands.add_parser(
        "verify", parents=[AS_JSON], help="verify that vLLM holds the same base, and name the weights that differ"
    )
    verify.add_argument("base", type=Path, help="directory made by `prepare`")
    where = verify.add_mutually_exclusive_group(required=True)
    where.add_argument("--local", action="store_true", help="start vLLM in this process")
    where.add_argument(
        "--server",
        metavar="URL",
        help="ask a running server of `qlora-rl serve`",
    )
    verify.add_argument(
        "--api-key-file", type=Path, metavar="F", help="the server's key; by default the environment's QLORA_RL_API_KEY"
    )
    verify.add_argument("--as-loaded", action="store_true", help="do not repair rounded scales first")
    verify.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 equal (repaired or not), 1 different, 2 could not tell."""
    from qlora_rl.base.checkpoint import MANIFEST, open_base
    from qlora_rl.errors import BaseIncompleteError, PolicyMismatchError

    found: dict[str, Any] = {"base": str(arguments.base), "file": "unknown", "state": "unknown", "repaired": 0}
    if not (arguments.base / MANIFEST).is_file():
        return _tell(arguments, found, f"could not tell: {arguments.base} is no prepared base (no {MANIFEST})", 2)
    try:
        base = open_base(arguments.base)
        found["file"] = "equal"
    except BaseIncompleteError as error:
        found |= {"file": "different", "differences": list(error.reasons)}
        return _tell(arguments, found, str(error), 1)
    from qlora_rl.engine.loading import loading

    try:
        with loading(*() if arguments.server else ("vllm.entrypoints.llm",), quietly=not arguments.server):
            if not arguments.server:
                from qlora_rl.engine.compat import vllm_version

                vllm_version()  # says what to do where there is none
            from qlora_rl.base.checkpoint import load_base
            from qlora_rl.base.fingerprint import fingerprint_stored
            from qlora_rl.sync.base_check import verify_base
            from qlora_rl.sync.function_check import FunctionCheck
        with _holder(arguments, base) as holder:
            proof = verify_base(
                fingerprint_stored(base), holder, allow_base_mismatch=True, repair=not arguments.as_loaded
            )
            if proof.is_verified and not arguments.server:
                function, said = FunctionCheck(load_base(base), holder), ""
                try:
                    function.compare()
                    said = function.why_not
                except PolicyMismatchError as error:
                    found |= {"state": "different", "function": [asdict(apart) for apart in function.found]}
                    return _tell(arguments, found, str(error), 1)
                except Exception as error:
                    said = str(error)
                if said:
                    text = (
                        f"{arguments.base}: all weights are equal in vLLM; could not tell what it computes with "
                        f"them: {said}"
                    )
                    return _tell(arguments, found | {"state": "equal"}, text, 2)
                found["function"] = [asdict(apart) for apart in function.found]
    except Exception as error:  # whatever stopped it: 1 would mean that the bases differ
        return _tell(arguments, found, f"could not tell: {error}", 2)
    found |= {
        "state": proof.diff.state,
        "weights": len(proof.ours.leaves),
        "repaired": len(proof.repaired),
        "largest_relative_error": max(proof.repaired.values(), default=0.0),
        "differences": [str(entry) for entry in proof.diff.entries],
        "digest": proof.ours.digest,
    }
    if not proof.is_verified:
        lines = "\n".join(f"  {entry}" for entry in proof.diff.entries)
        return _tell(arguments, found, f"{arguments.base}: {found['state']}\n{lines}", 1)
    how = f" after {found['repaired']} weights got their exact scales back" if proof.repaired else ""
    text = f"{arguments.base}: all {found['weights']} weights are equal in vLLM{how}"
    if not arguments.server:
        lengths = ", ".join(str(apart["tokens"]) for apart in found["function"])
        text += f", and what it computes with them is transformers' up to rounding, in sequences of {lengths} tokens"
    return _tell(arguments, found, text, 0)


@contextlib.contextmanager
def _holder(arguments: argparse.Namespace, base: Any) -> Iterator[Any]:
    """What is asked: a server, or an engine that is started for the question."""
    if arguments.server:
        from qlora_rl.engine.fleet import connect

        with connect(arguments.server, api_key_file=arguments.api_key_file, wait_s=0) as engine:
            yield engine
        return
    from transformers import AutoConfig

    from qlora_rl.engine.local import LocalEngine
    from qlora_rl.sync.function_check import reach_of

    options: dict[str, Any] = {
        "max_model_length": reach_of(AutoConfig.from_pretrained(base.path)),
        "max_num_seqs": 4,
        "repair_scales": False,
        "use_tqdm_on_load": False,
    }
    with LocalEngine(base, **options) as engine:
        yield engine


def _tell(arguments: argparse.Namespace, found: dict[str, object], text: str, code: int) -> int:
    import json

    if arguments.json:
        print(json.dumps(found | ({} if code == 0 else {"message": text}), indent=1))
    else:
        print(text, file=sys.stderr if code == 2 else sys.stdout)
    return code
