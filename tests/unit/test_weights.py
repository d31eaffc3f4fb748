"""Full weights of a server while several things are asked at once, with an engine that stops where a test wants it
to."""

import asyncio
import hashlib
from types import SimpleNamespace

import httpx
import pytest
import torch

from qlora_rl import EngineBrokenError, ServerTakenError, SyncError, VersionGoneError
from qlora_rl.base.fingerprint import digest_plain
from qlora_rl.engine.server.auth import Visits
from qlora_rl.engine.server.served_adapter import ServedPolicy
from qlora_rl.engine.server.served_weights import ServedWeights
from qlora_rl.engine.staging import STAGES, encode_part

WEIGHT = torch.ones(4, 4)


class Engine:
    """Loads when it is let; `fault` is what happens then."""

    def __init__(self):
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.fault = None

    async def collective_rpc(self, call, args=()):
        self.began.set()
        await self.may_end.wait()
        if isinstance(self.fault, Exception):
            raise self.fault
        return [self.fault or []]

    async def reset_prefix_cache(self):
        return True

    async def reset_encoder_cache(self):
        pass


async def sent(weights, version, session="me"):
    """A push that only has to be committed."""
    push = (await weights.begin(session, version))["push"]
    blob = b"".join(encode_part([("a", WEIGHT)]))
    await weights.write(session, push, 0, 0, blob)
    await weights.take(session, push, 0, hashlib.sha256(blob).hexdigest())
    return push


def made(tmp_path):
    return ServedWeights(Engine(), tmp_path, {"a": digest_plain(WEIGHT)})


def test_a_commit_that_comes_again_while_the_first_is_at_work_changes_nothing(tmp_path):
    async def run():
        weights = made(tmp_path)
        push = await sent(weights, 1)
        weights.engine.may_end.clear()
        first = asyncio.ensure_future(weights.commit("me", push))
        await weights.engine.began.wait()
        again = asyncio.ensure_future(weights.commit("me", push))
        await asyncio.sleep(0)
        weights.engine.may_end.set()
        assert await asyncio.gather(first, again) == [True, False]
        assert not await weights.commit("me", push)
        assert (weights.version, weights.loads, weights.lost) == (1, 1, "")

    asyncio.run(run())


@pytest.mark.parametrize("fault", [RuntimeError("vLLM is out of memory"), ["a"]])
def test_what_breaks_off_while_it_is_loaded_is_served_to_nobody_until_a_push_arrives_whole(tmp_path, fault):
    async def run():
        weights = made(tmp_path)
        await weights.commit("me", await sent(weights, 1))
        weights.engine.fault = fault
        with pytest.raises(SyncError, match=r"out of memory|no value came for 1 weights"):
            await weights.commit("me", await sent(weights, 2))
        assert list(tmp_path.glob(STAGES)) == []
        with pytest.raises(EngineBrokenError, match="only a part of weights version=2"):
            async with weights.reading():
                pass
        weights.engine.fault = None
        await weights.commit("me", await sent(weights, 3))
        async with weights.reading():
            assert weights.version == 3

    asyncio.run(run())


def test_an_engine_that_ends_in_a_commit_is_no_rejection_of_the_weights(tmp_path):
    pytest.importorskip("vllm")
    from vllm.v1.engine.exceptions import EngineDeadError

    async def run():
        weights = made(tmp_path)
        for fault in (EngineDeadError(), RuntimeError("Server shutting down")):
            weights.engine.fault = fault
            with pytest.raises(type(fault)) as caught:
                await weights.commit("me", await sent(weights, 1))
            assert caught.value is fault

    asyncio.run(run())


def test_what_is_withdrawn_during_a_commit_stays_withdrawn(tmp_path):
    async def run():
        weights = made(tmp_path)
        push = await sent(weights, 1)
        weights.engine.may_end.clear()
        commit = asyncio.ensure_future(weights.commit("me", push))
        await weights.engine.began.wait()
        weights.withdraw("the proof failed")
        weights.engine.may_end.set()
        await commit
        with pytest.raises(EngineBrokenError, match="the proof failed"):
            weights.reject_lost()
        await weights.commit("me", await sent(weights, 2))
        weights.reject_lost()

    asyncio.run(run())


@pytest.mark.parametrize("ask", ["generate", "score"])
@pytest.mark.parametrize(("by_digest", "or_before"), [(True, False), (False, False), (True, True)])
def test_a_request_that_waited_for_a_push_is_not_answered_by_another_version_than_it_named(
    tmp_path, ask, by_digest, or_before
):
    async def run():
        weights = made(tmp_path)
        store = SimpleNamespace(root=tmp_path / "store")
        policy = ServedPolicy(weights.engine, {}, store, {}, 0, 64, Visits(), weights)
        await weights.commit("me", await sent(weights, 1))
        wanted = (1 if or_before or not by_digest else None, policy.digest if by_digest else None, or_before)
        push = await sent(weights, 2)
        weights.engine.began.clear()
        weights.engine.may_end.clear()
        commit = asyncio.ensure_future(weights.commit("me", push))
        await weights.engine.began.wait()
        arguments = {"generate": ([], {}, None, wanted), "score": ([], False, wanted)}[ask]
        late = asyncio.ensure_future(getattr(policy, ask)(*arguments))
        await asyncio.sleep(0)
        weights.engine.may_end.set()
        error, said = (VersionGoneError, "version 2 serves") if or_before else (ServerTakenError, "version=2 serves")
        with pytest.raises(error, match=said):
            await late
        await commit

    asyncio.run(run())


@pytest.mark.parametrize("place", ["in a part", "before its commit", "in its commit"])
def test_of_two_trainers_one_that_is_lost_in_a_push_leaves_a_whole_version_and_the_other_goes_on(tmp_path, place):
    """It may be killed, or wake up later and go on where it was."""
    pytest.importorskip("vllm")
    from fastapi import FastAPI

    from qlora_rl.engine.server.routes import PREFIX, Api, TrainerLock

    weights, lease, app = made(tmp_path), TrainerLock(0.3), FastAPI()
    policy = ServedPolicy(weights.engine, {}, SimpleNamespace(root=tmp_path), {}, 0, 64, Visits(), weights)
    app.include_router(Api(policy, {}, lease).router())
    blob = b"".join(encode_part([("a", WEIGHT)]))

    async def run():
        async def ask(session, method, path, body=b"", code=200):
            headers = {"x-qlora-session": session}
            answer = await client.request(method, f"{PREFIX}/weights{path}", content=body, headers=headers)
            assert answer.status_code == code, answer.text
            return answer.json()

        async def send(session, version):
            push = (await ask(session, "POST", f"?version={version}"))["push"]
            await ask(session, "PUT", f"?push={push}&part=0&offset=0", blob)
            return push

        take = f"&part=0&digest={hashlib.sha256(blob).hexdigest()}"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            first, serves = await send("first", 1), 0
            if place != "in a part":
                await ask("first", "POST", f"/part?push={first}{take}")
            if place == "in its commit":
                weights.engine.may_end.clear()
                lost = asyncio.ensure_future(ask("first", "POST", f"/commit?push={first}"))
                await weights.engine.began.wait()
                await asyncio.sleep(0.4)
                await ask("second", "POST", "?version=1", code=409)  # what it asked for is being done
                weights.engine.may_end.set()
                await lost
                serves = 1
            await ask("second", "POST", "?version=1", code=409)
            assert (weights.version, weights.lost) == (serves, "")
            await asyncio.sleep(0.4)
            second = await send("second", 1)
            for path in (f"/part?push={first}{take}", f"/commit?push={first}"):
                await ask("first", "POST", path, code=409)
            await ask("second", "POST", f"/part?push={second}{take}")
            await ask("second", "POST", f"/commit?push={second}")
            assert (weights.version, weights.lost, policy.digest) == (1, "", second)
            assert not list(tmp_path.glob(STAGES))
            with pytest.raises(ServerTakenError):  # the same number, and not its weights
                await policy.score([], False, (1, first, False))

    asyncio.run(run())
