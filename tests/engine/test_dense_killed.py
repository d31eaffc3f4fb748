"""Full weights and servers that are killed: between two pushes, in the middle of one, and in the very commit. Servers
of their own."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from kinds import ADAPTER, FULL_WEIGHTS
from pair import SEQUENCES, Pair, trained

from qlora_rl import DenseSync, EngineBrokenError, ServerEngine, bake_base, start_server
from qlora_rl.engine.staging import STAGES

EXACT = 1e-5
OPTIONS = {"max_lora_rank": 0, "max_model_length": 32, "max_num_seqs": 8, "timeout_s": 600}


def stages(engine):
    return sorted(Path(engine._about["adapter_dir"]).glob(STAGES))


@pytest.mark.full  # three servers; unit/test_client.py has it without vLLM
def test_a_server_that_is_killed_serves_nothing_until_the_weights_were_pushed_again(untied, tmp_path, monkeypatch):
    """kill -9 between two pushes, and in the middle of one; a server of its own."""
    baked = bake_base(untied, "float32")
    with start_server(baked, **OPTIONS) as first, ServerEngine(first.url, api_key=first.key, wait_s=300) as engine:
        engine._near = None
        pair, port = Pair(engine, baked, tmp_path), int(first.url.rsplit(":", 1)[1])
        model = trained(pair.base, FULL_WEIGHTS["dora"])
        strategy = DenseSync(model, engine)
        strategy.push()
        running = [first]

        def kill_and_start():
            os.kill(running[-1].process.pid, signal.SIGKILL)
            running[-1].process.wait()
            running.append(start_server(baked, port=port, key=first.key, **OPTIONS))

        try:
            kill_and_start()
            for use in (lambda: engine.generate([[40, 41]], max_tokens=2), lambda: engine.score(SEQUENCES)):
                with pytest.raises(EngineBrokenError, match="restarted"):
                    use()
            assert engine.incarnation == 2
            assert not engine.holds_dense
            strategy.verify()  # what the trainer's bridge does when the engine was started anew
            assert pair.apart(model) < EXACT

            true, seen = engine._ask_once, []

            def dying(method, path, body):
                seen.append(path)
                if len(seen) == 3:
                    starter.submit(kill_and_start).result()
                return true(method, path, body)

            monkeypatch.setattr(engine, "_ask_once", dying)
            with ThreadPoolExecutor(
                1
            ) as starter:  # a server ends with the thread that has started it: not with a push's
                strategy.push()  # broken in the middle, and sent again to the server that came back
                assert engine.incarnation == 3
                assert pair.apart(model) < EXACT
        finally:
            for each in running:
                each.stop()


# Servers of its own; a kill in the stream is in test_dense_fleet.py, in the commit in no default test.
@pytest.mark.full
def test_a_server_that_is_killed_in_the_very_commit_serves_the_base_and_the_trainer_pushes_anew(
    untied, tmp_path, monkeypatch
):
    """kill -9 when all parts are there and none was loaded, and when vLLM has read some of them."""
    baked = bake_base(untied, "float32")
    monkeypatch.setattr("qlora_rl.engine.chunks.PART_BYTES", 2**16)  # several parts
    with start_server(baked, **OPTIONS) as first, ServerEngine(first.url, api_key=first.key, wait_s=1.0) as engine:
        running, port = [first], int(first.url.rsplit(":", 1)[1])
        pair = Pair(engine, baked, tmp_path)
        old, new = trained(pair.base, ADAPTER["plain"], seed=1), trained(pair.base, FULL_WEIGHTS["dora"], seed=2)
        true, places, seen = engine._ask_once, [], []

        def ask_openai(timeout):
            body = {"model": "policy", "prompt": SEQUENCES[0], "max_tokens": 1}
            return httpx.post(
                f"{first.url}/v1/completions",
                json=body,
                timeout=timeout,
                headers={"authorization": f"Bearer {first.key}"},
            )

        def kill_while_vllm_reads(parts):
            """Its last part is a pipe that nobody writes to: it has begun, and cannot end."""
            for child in vllm_of(running[-1]):
                os.kill(child, signal.SIGCONT)
            with pytest.raises(httpx.ReadTimeout):  # neither old nor new: it waits
                ask_openai(3.0)
            seen.append(parts)
            os.kill(running[-1].process.pid, signal.SIGKILL)

        def dying(method, path, body):
            if "/weights/commit" not in path or not places:
                return true(method, path, body)
            place = places.pop()
            if place == "whole":
                os.kill(running[-1].process.pid, signal.SIGKILL)
                return true(method, path, body)
            (taken,) = [stage for stage in stages(engine) if list(stage.glob("*.safetensors"))]
            for child in vllm_of(running[-1]):  # so that the parts are looked at once more before they are changed
                os.kill(child, signal.SIGSTOP)
            parts = sorted(taken.iterdir())

            def block():
                time.sleep(2.0)
                parts[-1].unlink()
                os.mkfifo(parts[-1])
                kill_while_vllm_reads(len(parts))

            thread = threading.Thread(target=block)
            thread.start()
            try:
                return true(method, path, body)
            finally:
                thread.join(60)

        monkeypatch.setattr(engine, "_ask_once", dying)
        try:
            for place in ("reading", "whole"):
                strategy = DenseSync(old, engine)
                strategy.push()
                assert pair.apart(old) < EXACT
                strategy.model = new
                places.append(place)
                with pytest.raises(EngineBrokenError, match="stayed away"):
                    strategy.push()
                assert not places
                running[-1].process.wait()
                running.append(start_server(baked, port=port, key=first.key, **OPTIONS))
                with ServerEngine(first.url, api_key=first.key) as reader:  # the base, whole
                    assert reader.version == 0
                    assert Pair(reader, baked, tmp_path).apart(pair.base) < EXACT
                assert ask_openai(60.0).status_code == 200
                with pytest.raises(EngineBrokenError, match="were lost"):  # and to the trainer, nothing
                    engine.score(SEQUENCES)
                assert not engine.holds_dense
                strategy.push()
                assert pair.apart(new) < EXACT
                assert stages(engine) == []
            assert seen[0] > 2
        finally:
            for each in running:
                each.stop()


def vllm_of(server):
    """Processes of vLLM's below a server's."""
    found, front = [], [server.process.pid]
    while front:
        pid = front.pop()
        children = [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        found, front = found + children, front + children
    return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM")]
