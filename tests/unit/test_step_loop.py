"""`Driver` with an engine that steps for ever: turns between its steps, and interrupts at any moment."""

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from qlora_rl.engine.local import step_loop
from qlora_rl.engine.local.step_loop import Driver, OwnStream, alone
from qlora_rl.errors import EngineBrokenError, RolloutCancelledError
from qlora_rl.stages import counted


class Engine:
    """Every step takes `seconds`, with Python's lock or without; nothing is ever done."""

    def __init__(self, seconds=0.002, is_python=False):
        self.seconds, self.is_python, self.steps, self.aborted = seconds, is_python, 0, []

    def add_request(self, name, prompt, params, lora_request):
        return name

    def step(self):
        self.steps += 1
        end = time.perf_counter() + self.seconds
        while self.is_python and time.perf_counter() < end:
            pass
        if not self.is_python:
            time.sleep(self.seconds)
        return []

    def abort_request(self, names, internal):
        self.aborted += names

    def has_unfinished_requests(self):
        return False


@contextlib.contextmanager
def stepping(driver, engine, count=1):
    """Calls of `count` threads that never end by themselves."""
    with ThreadPoolExecutor(count) as pool:
        calls = [driver.begin(engine, [[1]], [None], None) for _ in range(count)]
        done = [pool.submit(driver.finish, engine, call, lambda: None) for call in calls]
        yield done
        driver.cancel()
    assert all(isinstance(each.exception(), RolloutCancelledError) for each in done)


def is_free(driver):
    """Another thread gets a turn."""

    def take():
        return driver.door.acquire(timeout=60) and driver.lock.acquire(timeout=60)

    def give():
        driver.lock.release()
        driver.door.release()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: take() and (give() or True)).result()


def test_a_call_counts_its_sequences_while_it_lasts_and_forgets_them_at_its_end():
    told = []

    class Ends(Engine):
        def step(self):
            told.append(counted())
            self.steps += 1
            return [
                SimpleNamespace(
                    request_id=str(self.steps - 1), finished=True, outputs=[SimpleNamespace(finish_reason="stop")]
                )
            ]

    driver, engine = Driver(lambda: None), Ends()
    driver.finish(engine, driver.begin(engine, [[1]] * 3, [None] * 3, None), lambda: None)
    assert told[1:] == ["sequence 1 of 3", "sequence 2 of 3"]
    assert not counted()


@pytest.mark.parametrize("is_python", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_turn_comes_after_a_step_of_each_thread_that_steps(count, is_python):
    driver, engine, waited = Driver(lambda: None), Engine(0.02 if is_python else 0.002, is_python), []
    with stepping(driver, engine, count):
        for _ in range(20):
            began = engine.steps
            with driver.door, driver.lock:
                waited.append(engine.steps - began)
            time.sleep(engine.seconds / 2)
    # The machine may hold this thread up for a few steps before it asks, or those that step; once in a while.
    assert sorted(waited)[15] <= count + 1, waited
    assert engine.steps > 10, "and those that step go on"


def test_turns_that_are_asked_for_without_pause_do_not_stop_the_steps():
    driver, engine, turns, is_over = Driver(lambda: None), Engine(), [0, 0], threading.Event()

    def ask(who):
        while not is_over.is_set():
            with driver.door, driver.lock:
                turns[who] += 1
                time.sleep(0.001)

    with stepping(driver, engine), ThreadPoolExecutor(2) as pool:
        for who in (0, 1):
            pool.submit(ask, who)
        end = time.monotonic() + 300  # locks are not fair, and on a busy machine even less
        while time.monotonic() < end and (engine.steps < 20 or min(turns) < 20):
            time.sleep(0.01)
        is_over.set()
    assert engine.steps >= 20
    assert min(turns) >= 20


class Stream:
    """Notes for what it waited, as a stream of CUDA does."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_on_a_gpu_every_turn_and_every_step_is_on_the_stream_on_which_the_engine_was_built():
    log, here = [], threading.local()

    def current():
        if not hasattr(here, "stream"):
            here.stream = Stream(threading.current_thread().name, log)
        return here.stream

    @contextlib.contextmanager
    def on(stream):
        before, here.stream = current(), stream
        yield
        here.stream = before

    driver = Driver(lambda: None)
    driver.stream = OwnStream(current, on)

    class Steps(Engine):
        def step(self):
            log.append(f"a step on {current().name}")
            ended = [SimpleNamespace(finish_reason="stop")]
            return [SimpleNamespace(finished=True, request_id=driver._open[0].names[0], outputs=ended)]

    class Pushes:
        _driver = driver

        @alone
        def push(self):
            log.append(f"a push on {current().name}")

    def generate():
        engine = Steps()
        return driver.finish(engine, driver.begin(engine, ["a"], [None], None), lambda: None)

    driver.stream.keep(True)
    name = current().name
    for each in (generate, Pushes().push):
        each()
        done = f"a {'step' if each is generate else 'push'} on {name}"
        assert log == [done], "the thread that built the engine waits for nothing"
        log.clear()
        thread = threading.Thread(target=each, name="other")
        thread.start()
        thread.join()
        assert done in log
        assert log.index(f"{name} waits for other") < log.index(done)
        assert log[-1] == f"other waits for {name}"
        log.clear()


@pytest.fixture
def interrupts():
    """SIGINT again and again; it raises wherever the main thread is below drive.py, as in a script that does nothing
    else."""
    main, struck, is_over = threading.get_ident(), [], threading.Event()

    def strike(_, frame):
        while frame is not None:
            if frame.f_code.co_filename == step_loop.__file__:
                struck.append(frame.f_lasti)
                raise KeyboardInterrupt
            frame = frame.f_back

    def send():
        while not is_over.wait(0.0003):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, strike)
    thread = threading.Thread(target=send)
    thread.start()
    yield struck
    is_over.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


def test_no_interrupt_leaves_a_lock_behind(interrupts):
    driver, engine = Driver(lambda: None), Engine(0.0002)

    class Pushes:
        _driver = driver

        @alone
        def push(self):
            self.look()

        @alone
        def look(self):
            return [str(i) for i in range(20)]

    with stepping(driver, engine):
        pushes, end = Pushes(), time.monotonic() + 300
        while len(interrupts) < 600 and time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):
                while len(interrupts) % 100:
                    pushes.push()
                assert is_free(driver)
                pushes.push()
    assert len(interrupts) >= 300
    assert len(set(interrupts)) >= 2, "it has struck at one place only"
    assert is_free(driver)


def test_a_call_that_is_done_returns_though_an_interrupted_thread_gives_the_engine_up_just_then():
    broken = []
    driver, engine = Driver(lambda: broken.append(True)), Engine()
    call = driver.begin(engine, [[1]], [None], None)
    call.finished, call.left = [output()], 0
    # Where the call has looked whether it was ended, and has not gone yet.
    assert driver.finish(engine, call, lambda: driver.fail(EngineBrokenError("given up"))) == call.finished
    assert broken
    assert engine.steps == 0


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_vllm_gives_up_by_itself_is_no_completion(reason):
    driver, engine = Driver(lambda: None), Engine()
    call = driver.begin(engine, [[1], [2]], [None] * 2, None)
    call.finished, call.left = [output(), output(reason)], 0
    with pytest.raises(EngineBrokenError, match="before their end"):
        driver.finish(engine, call, lambda: None)


def output(reason="stop"):
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])


def test_whoever_changes_what_is_read_waits_for_the_calls_that_read_it():
    class Counted(Engine):
        """Each step is one token of every request; a request has three."""

        def __init__(self):
            super().__init__(0.0)
            self.left = {}

        def add_request(self, name, prompt, params, lora_request):
            self.left[name] = 3
            return name

        def abort_request(self, names, internal):
            super().abort_request(names, internal)
            for name in names:
                self.left.pop(name, None)

        def step(self):
            self.steps += 1
            self.left = {name: count - 1 for name, count in self.left.items()}
            done = [name for name, count in self.left.items() if not count]
            self.left = {name: count for name, count in self.left.items() if count}
            return [SimpleNamespace(finished=True, request_id=name) for name in done]

    driver, engine = Driver(lambda: None), Counted()
    first = driver.begin(engine, [[1]], [None], SimpleNamespace(lora_int_id=7))
    engine.step()
    second = driver.begin(engine, [[1]], [None], SimpleNamespace(lora_int_id=8))
    driver.drain(engine, 7)
    assert (first.left, second.left) == (0, 1), "only those that the adapter samples"
    driver.drain(engine)
    assert (first.left, second.left) == (0, 0)
    third = driver.begin(engine, [[1]], [None], None)
    driver.cancel()
    steps = engine.steps
    driver.drain(engine)
    assert engine.aborted == third.internal, "what has been cancelled is not waited for"
    assert engine.steps <= steps + 2
    with pytest.raises(RolloutCancelledError):
        driver.finish(engine, third, lambda: None)


def test_a_call_that_a_signal_has_ended_within_a_step_is_waited_for_by_nobody(monkeypatch):
    driver, engine = Driver(lambda: None), Engine()
    call = driver.begin(engine, [[1]], [None], None)

    def struck():
        raise SystemExit(143)

    monkeypatch.setattr(engine, "step", struck)
    with pytest.raises(SystemExit):
        driver.finish(engine, call, lambda: None)
    driver.drain(engine)  # would go on for ever
