"""Two real servers, and what can happen to them: kill -9, full disks, processes that stand still, thieves. The old
version serves."""

import contextlib
import ctypes
import ctypes.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support import cpu_seconds, since_vllm
from test_server import children, ended, scaled
from test_training import lines, make

from qlora_rl import (
    AdapterSync,
    Canary,
    EngineBrokenError,
    ServerEngine,
    ServerTakenError,
    SyncError,
    connect,
    prepare_base,
    start_server,
)
from qlora_rl.adapter.store import pack_adapter
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.sync.transports import BytesTransport

OPTIONS = {"max_lora_rank": 8, "max_model_length": 64, "max_num_seqs": 64, "timeout_s": 300}
SAMPLING = {"max_tokens": 12, "seed": 1, "temperature": 0.9}


class Kept:
    """A server that can be killed, and started again on its port with its key."""

    def __init__(self, base, pool, key, adapter_dir):
        self.base, self.pool, self.key = base, pool, key
        self.options = OPTIONS | {"key": key, "adapter_dir": str(adapter_dir)}
        self.adapter_dir = Path(adapter_dir)
        self.server = pool.submit(start_server, base, **self.options).result()
        self.url = self.server.url

    @property
    def headers(self):
        return {"authorization": f"Bearer {self.key}"}

    def state(self):
        return httpx.get(self.url + "/qlora/v1/state", headers=self.headers, timeout=60).json()

    def store(self):
        """Where the server writes versions."""
        (store,) = self.adapter_dir.glob("qlora-rl-adapter-*")
        return store

    @contextlib.contextmanager
    def standing_still(self):
        """vLLM's engine does nothing; the server in front of it goes on."""
        offspring = children(self.server.process.pid)
        for pid in offspring:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in offspring:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill(self):
        offspring = children(self.server.process.pid)
        self.server.process.kill()
        self.server.process.wait()
        for pid in offspring:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert ended(offspring, 60) == []  # vLLM's engine goes with its server
        shutil.rmtree(self.store())
        self.server.stop()

    def start_again(self):
        # The kernel ends a server with the thread that started it: one of the pool's, which stay.
        port = int(self.url.rsplit(":", 1)[1])
        self.server = self.pool.submit(start_server, self.base, port=port, **self.options).result()

    def replace(self, when):
        """In the background: wait for something, kill -9, start again."""

        def run():
            end = time.monotonic() + 120
            while not when():
                assert time.monotonic() < end
                time.sleep(0.02)
            self.kill()
            self.start_again()

        return InBackground(run)


class InBackground(threading.Thread):
    """A thread whose error is raised at the end of a `with` block."""

    def __init__(self, work):
        super().__init__()
        self.work, self.error = work, None
        self.start()

    def run(self):
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.join()
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def servers(base, tmp_path_factory):
    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(2) as both:
        roots = [tmp_path_factory.mktemp("adapters") for _ in range(2)]
        kept = list(both.map(lambda root: Kept(base, pool, "one-key-for-both-servers", root), roots))
        try:
            yield kept
        finally:
            for each in kept:
                each.server.stop()


@pytest.fixture
def one(servers):
    """The first server, asked alone."""
    if servers[0].server.process.poll() is not None:  # a test has failed before it started it again
        servers[0].server.stop()
        servers[0].start_again()
    with ServerEngine(servers[0].url, api_key=servers[0].key, wait_s=300.0) as engine:
        engine.claim(force=True)
        engine.drop_adapter()
        yield engine


@pytest.fixture
def both(servers):
    """The two as one engine."""
    with connect([each.url for each in servers], api_key=servers[0].key, wait_s=300.0) as engine:
        engine.claim(force=True)
        engine.drop_adapter()
        yield engine


def blob(bundle, factor=1.0):
    return pack_adapter(scaled(bundle, factor))


def sampled(engine, prompts):
    rollout = engine.generate(prompts * 4, **SAMPLING)
    return rollout.completion_ids, rollout.logprobs, rollout.version


def digests(bundle):
    return {name: digest_bytes(tensor) for name, tensor in bundle.tensors.items()}


# --- several servers ------------------------------------------------------------------------------------------------


def test_two_replicas_draw_to_the_last_bit_what_one_server_draws(servers, both, bundle, prompts):
    both.close()
    with ServerEngine(servers[1].url, api_key=servers[1].key) as one:
        bare = sampled(one, prompts)
        one.load_packed(blob(bundle), 1)
        expected = sampled(one, prompts)
        one.drop_adapter()
    both = connect([each.url for each in servers], api_key=servers[0].key)
    assert sampled(both, prompts) == bare
    both.load_packed(blob(bundle), 1)
    assert sampled(both, prompts) == expected
    assert both.held_adapter(8) == digests(bundle)
    both.close()


def test_a_push_to_two_is_verified_in_each(both, adapted):
    canary = Canary(adapted, both)
    canary.calibrate()
    strategy = AdapterSync(adapted, both, BytesTransport(), canary)
    report = strategy.push()
    assert (report.version, both.version, report.transport) == (1, 1, "http")
    scores = both.score_each(canary.sequences)
    assert len(scores) == 2
    assert scores[0] == scores[1]


def test_a_training_on_two_replicas(servers, base, tmp_path):
    key = tmp_path / "key"
    key.write_text(servers[0].key)
    urls = [each.url for each in servers]
    limits = {"max_steps": 2, "vllm_max_model_length": None, "share_base": False}
    with make(base, tmp_path / "two", rollout=urls, api_key_file=key, **limits) as trainer:
        trainer.train()
        assert [each.version for each in trainer.engine.live] == [2, 2]
    assert json.loads((tmp_path / "two" / "config.json").read_text())["rollout"] == ",".join(urls)
    with make(base, tmp_path / "one", rollout=urls[0], api_key_file=key, **limits) as trainer:
        trainer.train()
    two, one = (lines(tmp_path / name) for name in ("two", "one"))
    for name in ("reward", "mismatch_kl", "policy_version"):
        assert two[0][name] == one[0][name]


def test_when_the_disk_of_one_replica_is_full_both_serve_the_version_before(servers, both, bundle, prompts):
    both.load_packed(blob(bundle), 1)
    served = sampled(both, prompts)
    with writing_at_most(servers[1].server.process.pid, 4096), pytest.raises(SyncError, match=servers[1].url):
        both.load_packed(blob(bundle, 2.0), 2)
    assert [each.version for each in both.live] == [1, 1]
    assert sampled(both, prompts) == served
    assert both.held_adapter(8) == digests(bundle)
    both.load_packed(blob(bundle, 2.0), 2)
    assert both.held_adapter(8) == digests(scaled(bundle, 2.0))


def test_a_replica_killed_in_a_rollout_is_done_without_and_taken_back_when_it_is_there_again(
    servers, both, bundle, prompts
):
    both.load_packed(blob(bundle), 1)
    served = sampled(both, prompts)
    with servers[1].standing_still():  # its share cannot come to an end before it is killed
        rollout_is_due = time.monotonic() + 1.0
        with InBackground(lambda: (time.sleep(max(0.0, rollout_is_due - time.monotonic())), servers[1].kill())):
            assert sampled(both, prompts) == served
    assert [each.url for each in both.live] == [servers[0].url]
    both.load_packed(blob(bundle, 2.0), 2)
    alone = sampled(both, prompts)
    servers[1].start_again()
    incarnation = both.incarnation
    end = time.monotonic() + 120
    while len(both.live) < 2 and time.monotonic() < end:
        time.sleep(0.2)
        both.wake()
    assert [each.version for each in both.live] == [2, 2]
    assert both.incarnation > incarnation
    assert both.held_adapter(8) == digests(scaled(bundle, 2.0))
    assert sampled(both, prompts) == alone


# --- the disk -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing_at_most(pid, nbytes):
    """No file of that process may grow beyond so many bytes: a write fails as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def tiny_disk(directory, nbytes):
    """A real file system of so many bytes over the directory; needs root."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    if libc.mount(b"none", str(directory).encode(), b"tmpfs", 0, f"size={nbytes}".encode()):
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        assert libc.umount2(str(directory).encode(), 2) == 0  # 2: as soon as nobody uses it


def test_a_full_adapter_directory_is_said_and_the_old_version_serves(servers, one, bundle, prompts):
    """A file system without room where this process may mount one, and a limit on the size of files in any case."""
    one.load_packed(blob(bundle), 1)
    served, store = sampled(one, prompts), servers[0].store()
    before = sorted(path.name for path in store.iterdir())
    faults = [(writing_at_most(servers[0].server.process.pid, 4096), "writing adapter version=2.*Free some")]
    if os.geteuid() == 0:
        faults.append((tiny_disk(store, 16384), "writing adapter version=2.*0.0 MiB are free.*Free some"))
    for fault, says in faults:
        try:
            with fault, pytest.raises(SyncError, match=says):
                one.load_packed(blob(bundle, 2.0), 2)
        except PermissionError:  # root of a container that may not mount
            continue
        assert one.version == 1
        assert sampled(one, prompts) == served
        assert sorted(path.name for path in store.iterdir()) == before
    one.load_packed(blob(bundle, 2.0), 2)
    assert one.held_adapter(8) == digests(scaled(bundle, 2.0))


# --- a server that stands still, or that somebody else takes --------------------------------------------------------


def test_a_push_into_a_server_that_stands_still_ends_in_time_and_the_old_version_serves(servers, one, bundle, prompts):
    """It arrives after all, when nobody waits for it any more; then what was verified is served again."""
    one.load_packed(blob(bundle), 1)
    served = sampled(one, prompts)
    one.connection.client.timeout, one.wait_s = httpx.Timeout(3.0), 0.5
    with servers[0].standing_still(), pytest.raises(EngineBrokenError, match="stayed away"):
        one.load_packed(blob(bundle, 2.0), 2)
    one.connection.client.timeout, one.wait_s = httpx.Timeout(300.0), 300.0
    assert sampled(one, prompts) == served
    assert one.held_adapter(8) == digests(bundle)
    one.load_packed(blob(bundle, 2.0), 2)
    assert one.held_adapter(8) == digests(scaled(bundle, 2.0))


@pytest.mark.parametrize("version", [1, 5])
def test_a_rollout_is_never_sampled_with_the_adapter_of_another_trainer(servers, one, bundle, prompts, version):
    """Also where both count alike, and after other requests."""
    one.load_packed(blob(bundle), 1)
    with ServerEngine(servers[0].url, api_key=servers[0].key) as second:
        second.claim(force=True)
        second.load_packed(blob(bundle, 2.0), version)
        one.wake()
        for asked in (lambda: sampled(one, prompts), lambda: one.score(prompts)):
            with pytest.raises(ServerTakenError, match="start another server"):
                asked()
        with pytest.raises(ServerTakenError, match="another trainer"):
            one.load_packed(blob(bundle, 3.0), 2)
        assert second.held_adapter(8) == digests(scaled(bundle, 2.0))


# --- Ctrl-C in the middle of a start --------------------------------------------------------------------------------

SERVE = """
import sys
from qlora_rl.cli import main
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--max-model-length", "64", "--max-num-seqs", "4"]))
"""
BESIDE = """
import sys
from qlora_rl.engine.server import LocalServer
try:
    LocalServer(sys.argv[1], max_model_length=64, max_num_seqs=4)
except KeyboardInterrupt:
    print("qlora-rl: interrupted", file=sys.stderr)
    sys.exit(130)
"""


def offspring_of(pid):
    with contextlib.suppress(psutil.Error):
        return [
            child
            for child in psutil.Process(pid).children(recursive=True)
            if "resource_tracker" not in str(child.cmdline())
        ]
    return []


@since_vllm("0.31", "the modules of the server that we start")
# Each starts vLLM; by default `serve` by itself, and a start by a trainer only here.
@pytest.mark.parametrize(("code", "wanted"), [(SERVE, 1), pytest.param(BESIDE, 2, marks=pytest.mark.full)])
def test_ctrl_c_while_vllms_engine_starts_ends_all_of_it_with_one_line(base, tmp_path, code, wanted):
    """As a terminal does it: to the whole group."""
    log = tmp_path / "log"
    with log.open("wb") as out:
        job = subprocess.Popen(
            [sys.executable, "-c", code, str(base)], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            end = time.monotonic() + 180
            while len(offspring := offspring_of(job.pid)) < wanted and job.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            assert len(offspring) >= wanted
            os.killpg(job.pid, signal.SIGINT)
            assert job.wait(90) == 130
            assert ended([child.pid for child in offspring], 30) == []
        finally:
            for each in [*offspring_of(job.pid), job]:
                each.kill()
            job.wait()
    said = log.read_text()
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said
    assert said.count("qlora-rl: interrupted") == 1


@since_vllm("0.31", "the modules of the server that we start")
# Each starts vLLM; by default the later moment.
@pytest.mark.parametrize("when", [pytest.param("", marks=pytest.mark.full), "Starting to load model"])
def test_a_server_that_is_killed_while_vllms_engine_starts_leaves_no_process_behind(base, tmp_path, when):
    """As soon as the engine's process is there, and when it loads the model: only later would our worker extension see
    to it."""
    log = tmp_path / "log"
    with log.open("wb") as out:
        job = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(base)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
        )
    offspring = []
    try:
        end = time.monotonic() + 300
        while not (offspring and when in log.read_text()):
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
            if when in log.read_text():  # to look through all processes takes as long
                offspring = offspring_of(job.pid)
        assert "serving" not in log.read_text()
        job.kill()
        job.wait()
        assert ended([child.pid for child in offspring], 240) == []
    finally:
        for each in [*offspring, job]:
            with contextlib.suppress(psutil.Error):
                each.kill()
        job.wait()


# --- under a trainer ------------------------------------------------------------------------------------------------


def test_an_openai_client_chats_while_a_training_runs(servers, base, tmp_path):
    """Each answer is one that a version gives which was pushed; none fails."""
    import openai
    from transformers import TrainerCallback

    key = tmp_path / "key"
    key.write_text(servers[0].key)
    client = openai.OpenAI(base_url=servers[0].url + "/v1", api_key=servers[0].key, max_retries=0, timeout=120)

    def say():
        found = client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "12+34="}],
            max_completion_tokens=6,
            temperature=0.0,
            logprobs=True,
        )
        return [(token.token, round(token.logprob, 3)) for token in found.choices[0].logprobs.content]

    known, heard, is_over = {}, [], threading.Event()

    class Listen(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            known[state.global_step] = say()

    def chat():
        while not is_over.is_set():
            if "policy" in [model.id for model in client.models.list()]:
                heard.append(say())

    limits = {"max_steps": 8, "vllm_max_model_length": None, "share_base": False}
    with make(base, tmp_path / "run", rollout=servers[0].url, api_key_file=key, **limits) as trainer:
        trainer.add_callback(Listen())
        with InBackground(chat):
            try:
                trainer.train()
            finally:
                is_over.set()
    assert len(heard) >= 2
    assert sorted(known) == list(range(1, 9))
    assert len({str(each) for each in known.values()}) > 1
    assert all(answer in known.values() for answer in heard)


def test_killed_in_the_middle_of_a_push_it_is_waited_for_verified_and_pushed_to_again(servers, one, bundle, prompts):
    one.load_packed(blob(bundle), 1)
    served, store = sampled(one, prompts), servers[0].store()
    with servers[0].standing_still():  # the bytes arrive and are written, and vLLM does not load them
        before = set(store.iterdir())
        with servers[0].replace(lambda: {p for p in set(store.iterdir()) - before if p.name.startswith("v")}):
            one.load_packed(blob(bundle, 2.0), 2)
    assert (one.version, one.incarnation) == (2, 2)
    assert one.held_adapter(8) == digests(scaled(bundle, 2.0))
    one.load_packed(blob(bundle), 1)
    assert sampled(one, prompts) == served


@pytest.mark.full  # two trainings; the test above kills in a push, without a trainer
def test_a_training_goes_on_after_its_server_was_killed_in_a_push_and_between_two(servers, base, tmp_path):
    """The metrics are those of a training that nothing happened to."""
    key = tmp_path / "key"
    key.write_text(servers[0].key)
    limits = {"max_steps": 4, "vllm_max_model_length": None, "share_base": False}
    calls, running, still = [], [], contextlib.ExitStack()

    def reward(completions, **_):
        calls.append(len(completions))
        if len(calls) == 1:  # the next push arrives and is never loaded
            store = servers[0].store()
            before = set(store.iterdir())
            still.enter_context(servers[0].standing_still())
            running.append(servers[0].replace(lambda: set(store.iterdir()) - before))
        if len(calls) == 3:  # nothing is asked of it now
            running[0].__exit__()
            servers[0].kill()
            running.append(InBackground(servers[0].start_again))
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    with make(base, tmp_path / "quiet", rollout=servers[0].url, api_key_file=key, **limits) as trainer:
        trainer.train()
    with ServerEngine(servers[0].url, api_key=servers[0].key, wait_s=300.0) as engine:
        engine.claim()
        engine.drop_adapter()
        with make(base, tmp_path / "loud", rollout=engine, reward_funcs=reward, **limits) as trainer, still:
            trainer.train()
        for each in running:
            each.__exit__()
        assert engine.incarnation == 3
    quiet, loud = lines(tmp_path / "quiet"), lines(tmp_path / "loud")
    assert [row["policy_version"] for row in loud] == [1, 2, 3, 4]
    for row, other in zip(loud, quiet, strict=True):
        for name in ("reward", "mismatch_kl"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-9)


@pytest.mark.full  # starts two servers; unit/test_fleet.py has it without vLLM
def test_a_replica_that_comes_back_on_another_base_is_left_out(servers, other_model_dir, both, bundle, prompts, caplog):
    both.load_packed(blob(bundle), 1)
    served, right = sampled(both, prompts), servers[1].base
    servers[1].kill()
    both.wake()
    servers[1].base = prepare_base(other_model_dir)
    servers[1].start_again()
    end = time.monotonic() + 60
    while "is not taken back" not in caplog.text and time.monotonic() < end:
        time.sleep(0.2)
        both.wake()
    assert "another base" in caplog.text
    assert sampled(both, prompts) == served
    assert [each.url for each in both.live] == [servers[0].url]
    servers[1].kill()
    servers[1].base = right
    servers[1].start_again()


def end_politely(server):
    server.process.terminate()


def kill_the_engine(server):
    for child in offspring_of(server.process.pid):
        child.kill()


@pytest.mark.parametrize(("end", "code"), [(end_politely, 0), (kill_the_engine, 1)])
def test_a_server_that_ends_in_a_rollout_is_gone_within_a_minute_and_the_next_one_draws_it(
    servers, one, bundle, prompts, end, code
):
    one.load_packed(blob(bundle), 1)
    long = SAMPLING | {"max_tokens": 48, "extra": {"ignore_eos": True}}
    few = prompts * 30
    rollouts = []

    one.generate(prompts, **long)  # the first one is slower
    before = cpu_seconds(servers[0].server.process.pid)
    wanted = one.generate(few, **long).completion_ids
    cost = cpu_seconds(servers[0].server.process.pid) - before
    process, offspring = servers[0].server.process, children(servers[0].server.process.pid)
    before = cpu_seconds(process.pid)
    # Four times as many: with as many, two seconds' work was done before a busy machine had seen the signal.
    with InBackground(lambda: rollouts.append(one.generate(few * 4, **long))):
        while cpu_seconds(process.pid) < before + cost / 6:  # a busy server answers no question of ours
            assert not rollouts
            time.sleep(0.005)
        end(servers[0].server)
        assert process.wait(60) == code
        assert not rollouts
        assert ended(offspring, 60) == []
        servers[0].server.stop()
        servers[0].start_again()
    (rollout,) = rollouts
    assert (rollout.version, one.incarnation) == (1, 2)
    assert len(rollout.completion_ids) == 4 * len(few)
    assert rollout.completion_ids[: len(few)] == wanted


def test_too_long_a_wait_ends_a_training_with_a_checkpoint_and_an_error_that_says_what_to_do(servers, base, tmp_path):
    """The last test: its server does not come back."""

    def reward(completions, **_):
        calls.append(len(completions))
        if len(calls) == 2:
            servers[0].kill()
        return [float(len(text)) for text in completions]

    calls: list[int] = []
    with ServerEngine(servers[0].url, api_key=servers[0].key, wait_s=1.0) as engine:
        engine.claim(force=True)
        engine.drop_adapter()
        limits = {"max_steps": 4, "vllm_max_model_length": None, "share_base": False}
        with (
            make(base, tmp_path, rollout=engine, reward_funcs=reward, **limits) as trainer,
            pytest.raises(EngineBrokenError, match=r"wait_s=1 s\. Start it again"),
        ):
            trainer.train()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert "Start it again" in summary["error"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert [row["policy_version"] for row in lines(tmp_path)] == [1, 2]
