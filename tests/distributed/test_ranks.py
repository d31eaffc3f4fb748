"""What the ranks of one training say to each other; threads stand for processes, over a real store."""

import contextlib
import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import DistributedType

from qlora_rl import EngineBrokenError, SamplingSpec, distributed, sharded_tensors
from qlora_rl.contracts import Rollout
from qlora_rl.distributed import Ranks
from qlora_rl.errors import (
    ConfigConflictError,
    NotYetSupportedError,
    RankLostError,
    RolloutCancelledError,
    RunDirectoryError,
    SyncError,
    VersionGoneError,
)
from qlora_rl.sync.full_weights import DenseStream
from qlora_rl.train.ranks.shared_engine import SharedEngine, SharedTransport
from qlora_rl.train.setup.processes import check_processes, check_turns, sharding_of


@contextlib.contextmanager
def ranks_of(size):
    first = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [first] + [
        torch.distributed.TCPStore("127.0.0.1", first.port, is_master=False, timeout=timedelta(seconds=30))
        for _ in range(size - 1)
    ]
    ranks = [Ranks(rank, size, store, limit_s=60) for rank, store in enumerate(stores)]
    yield ranks
    for each in reversed(ranks):
        each.close()


@pytest.fixture
def pair():
    with ranks_of(2) as ranks:
        yield ranks


def both(pair, do):
    """`do(ranks)` on all at once: what each returned, or raised."""
    found = [None] * len(pair)

    def run(ranks):
        try:
            found[ranks.rank] = do(ranks)
        except Exception as error:
            found[ranks.rank] = error

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_rank_hears_all_values_in_the_order_of_the_ranks(pair):
    big = "x" * (9 * 2**20)  # more than the store takes at once
    assert both(pair, lambda r: r.gather((r.rank, big), "talking")) == [[(0, big), (1, big)]] * 2
    for _ in range(5):
        assert both(pair, lambda r: r.gather(r.rank, "talking")) == [[0, 1]] * 2


def test_what_rank_0_makes_or_raises_is_made_or_raised_on_all(pair):
    assert both(pair, lambda r: r.share(lambda: {"by": r.rank}, "making")) == [{"by": 0}] * 2

    def fails():
        raise RunDirectoryError("opening: it is full.", reasons=["it is full"])

    ours, theirs = both(pair, lambda r: r.share(fails, "making"))
    assert type(ours) is type(theirs) is RunDirectoryError
    assert str(ours) == str(theirs)
    assert ours.reasons == theirs.reasons
    assert theirs.__notes__ == ["raised on rank 0"]


def test_a_block_that_fails_on_one_rank_fails_on_all_wherever_the_others_are(pair):
    def enter(ranks):
        with ranks.together("working"):
            if ranks.rank == 1:
                raise ValueError("only here")
            ranks.gather("deep inside", "another thing")

    assert [str(each) for each in both(pair, enter)] == ["only here", "only here"]
    assert both(pair, lambda r: r.gather(r.rank, "afterwards")) == [[0, 1]] * 2


def test_what_another_rank_has_failed_with_is_raised_although_an_engine_says_it_in_its_own_words(pair):
    def enter(ranks):
        with ranks.together("pushing"):
            if ranks.rank == 1:
                raise ValueError("only here")
            try:
                ranks.barrier("gathering a layer")
            except ValueError as error:
                raise RuntimeError("the stream broke") from error

    assert [repr(each) for each in both(pair, enter)] == ["ValueError('only here')"] * 2
    assert both(pair, lambda r: r.gather(r.rank, "afterwards")) == [[0, 1]] * 2


class Takes:
    """Rank 0's engine, as far as full weights need it."""

    url, version, incarnation = "here", 0, 1

    def capabilities(self):
        return None

    def load_dense(self, weights, version):
        self.held = dict(weights)
        if version == 2:
            raise SyncError("loading weights version=2: the disk is full.")
        self.version = version
        return 24

    def close(self):
        pass


def test_rank_0_alone_sends_full_weights_and_all_learn_what_was_sent_or_why_not(pair):
    engines = both(pair, lambda ranks: SharedEngine(Takes, ranks))
    model, made = torch.nn.Linear(2, 2), []

    def push(ranks, version):
        stream = DenseStream(model, torch.float32, digests=True)
        nbytes = engines[ranks.rank].load_dense(stream, version)
        made.append(stream.seconds > 0)
        return nbytes, stream.count, sorted(stream.digests), engines[ranks.rank].version

    assert both(pair, lambda ranks: push(ranks, 1)) == [(24, 2, ["bias", "weight"], 1)] * 2
    assert sorted(made) == [False, True]
    assert torch.equal(engines[0].inner.held["weight"], model.weight)
    ends = both(pair, lambda ranks: push(ranks, 2))
    assert [repr(each) for each in ends] == ["SyncError('loading weights version=2: the disk is full.')"] * 2


class Draws(Takes):
    """An engine of a group of ranks: a completion is the prompt, and the place that decides its seed."""

    def __init__(self, rank):
        self.rank, self.calls, self.version = rank, [], 0

    def generate(self, prompts, sampling):
        self.calls.append(prompts)
        if self.rank == 2 and len(self.calls) == 2:
            raise EngineBrokenError("generating: the second group's engine is gone.")
        ids = [[*prompt, sampling.first_place + i] for i, prompt in enumerate(prompts)]
        return Rollout(ids, [[0.0] * len(each) for each in ids], self.version, 0.1)

    def load_adapter(self, directory, version):
        self.version, self.loaded = version, directory

    def withdraw_adapter(self, reason):
        self.withdrawn = reason


class Way:
    """A transport of one rank."""

    name = "directory"
    is_stuck = False

    def __init__(self, rank):
        self.rank, self.committed = rank, 0

    def deliver(self, adapter, version, engine):
        if (self.rank, version) == (2, 6):
            raise SyncError("delivering the adapter: the disk is full.")
        engine.load_adapter(f"of rank {self.rank}", version)
        return self.rank

    def revoke(self, engine, version):
        if self.is_stuck:
            raise SyncError("taking the adapter back: the disk is full.")
        engine.load_adapter(f"before of rank {self.rank}", engine.version - 1)

    def commit(self, pushed=None):
        self.committed += 1

    def before(self):
        return self.rank


def test_an_engine_of_all_ranks_may_give_no_logprobs(pair):
    class Silent(Draws):
        def generate(self, prompts, sampling):
            return replace(super().generate(prompts, sampling), logprobs=None)

    engines = both(pair, lambda ranks: SharedEngine(lambda: Silent(ranks.rank), ranks))
    sampled = both(
        pair, lambda ranks: engines[ranks.rank].generate([[ranks.rank]], SamplingSpec(first_place=ranks.rank))
    )
    assert [(each.completion_ids, each.logprobs) for each in sampled] == [([[0, 0]], None), ([[1, 1]], None)]


class Slow(Draws):
    """Holds two versions, and waits before it answers until it may, or is cancelled."""

    def __init__(self, rank):
        super().__init__(rank)
        self.may, self.ended = threading.Event(), False

    def capabilities(self):
        return SimpleNamespace(holds_two=True)

    def generate(self, prompts, sampling, *, version=None):
        if prompts == [[99]]:
            raise VersionGoneError("version 3 is gone")
        self.may.wait(60)
        if self.ended:
            raise RolloutCancelledError("ended")
        return replace(super().generate(prompts, sampling), version=version)

    def cancel(self):
        self.ended = True
        self.may.set()


@pytest.fixture
def asked(pair):
    """An engine of rank 0 that threads of both ranks ask."""
    engines = both(pair, lambda ranks: SharedEngine(lambda: Slow(ranks.rank), ranks))
    both(pair, lambda ranks: engines[ranks.rank].let_threads_ask())
    yield engines
    for engine in engines:
        engine.close()


def in_thread(do):
    found = []

    def run():
        try:
            found.append(do())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_threads_of_a_rank_ask_the_engine_of_another_one_which_waits_for_nobody(asked):
    spec = SamplingSpec(max_tokens=1, first_place=4)
    asks = [in_thread(lambda i=i: asked[1].generate([[i], [i, i]], spec, version=i)) for i in (1, 2)]
    mine = in_thread(lambda: asked[0].generate([[7]], spec, version=2))
    asked[0].inner.may.set()
    for thread, _ in (*asks, mine):
        thread.join(60)
    answers = [found[0] for _, found in (*asks, mine)]
    assert [(each.completion_ids, each.version) for each in answers] == [
        ([[1, 4], [1, 1, 5]], 1),
        ([[2, 4], [2, 2, 5]], 2),
        ([[7, 4]], 2),
    ]
    with pytest.raises(VersionGoneError, match="version 3") as error:
        asked[1].generate([[99]], spec, version=3)
    assert error.value.__notes__ == ["raised on rank 0"]


def test_a_rank_that_ends_cancels_what_its_threads_have_asked_for_and_may_ask_again(asked):
    spec = SamplingSpec(max_tokens=1)
    thread, found = in_thread(lambda: asked[1].generate([[1]], spec, version=1))
    while not asked[1]._desk._asked:
        pass
    asked[1].cancel()
    thread.join(60)
    assert isinstance(found[0], RolloutCancelledError)
    asked[0].inner.may.set()
    assert asked[1].generate([[2]], spec, version=1).completion_ids == [[2, 0]]


def test_each_group_of_ranks_draws_for_its_own_prompts_on_an_engine_of_its_own_as_one_engine_would():
    with ranks_of(4) as four:
        engines = both(four, lambda ranks: SharedEngine(lambda: Draws(ranks.rank), ranks, 2))
        assert [engine.inner is not None for engine in engines] == [True, False, True, False]

        def sample(ranks):
            spec = SamplingSpec(max_tokens=1, first_place=2 * ranks.rank, seed=7)
            rollout = engines[ranks.rank].generate([[ranks.rank, 0], [ranks.rank, 1]], spec)
            return rollout.completion_ids, rollout.version

        # Of eight prompts in all, each with the place that it would have in one process.
        places = [[[r, 0, 2 * r], [r, 1, 2 * r + 1]] for r in range(4)]
        assert both(four, sample) == [(each, 0) for each in places]
        assert [engines[r].inner.calls for r in (0, 2)] == [
            [[[0, 0], [0, 1], [1, 0], [1, 1]]],
            [[[2, 0], [2, 1], [3, 0], [3, 1]]],
        ]
        ends = both(four, sample)
        assert [repr(each) for each in ends] == [
            'EngineBrokenError("generating: the second group\'s engine is gone.")'
        ] * 4

        ways = [SharedTransport(Way(rank), engines[rank]) for rank in range(4)]
        adapter = SimpleNamespace(bundle=lambda: None)
        delivered = both(four, lambda ranks: ways[ranks.rank].deliver(adapter, 5, engines[ranks.rank]))
        assert delivered == [0, 0, 2, 2]
        assert [(engine.version, engine.inner and engine.inner.loaded) for engine in engines] == [
            (5, "of rank 0"),
            (5, None),
            (5, "of rank 2"),
            (5, None),
        ]
        for way in ways:
            way.commit()
        assert [way.inner.committed for way in ways] == [1, 0, 1, 0]
        assert both(four, lambda ranks: ways[ranks.rank].before()) == [0, 0, 2, 2]

        # Where one engine does not take a push, no other one is left with a version that nobody will verify.
        ends = both(four, lambda ranks: ways[ranks.rank].deliver(adapter, 6, engines[ranks.rank]))
        assert [repr(each) for each in ends] == ["SyncError('delivering the adapter: the disk is full.')"] * 4
        assert [engine.version for engine in engines] == [5] * 4
        assert [(engines[r].inner.version, engines[r].inner.loaded) for r in (0, 2)] == [
            (5, "before of rank 0"),
            (5, "of rank 2"),
        ]
        ways[0].inner.is_stuck = True
        both(four, lambda ranks: ways[ranks.rank].deliver(adapter, 6, engines[ranks.rank]))
        assert engines[0].inner.withdrawn == (
            "version=6 did not arrive everywhere, and the one before it could not be loaded"
        )


def test_an_error_that_cannot_travel_is_told_in_words(pair):
    def enter(ranks):
        with ranks.together("working"):
            if ranks.rank == 1:
                error = ValueError("with a lock in it")
                error.lock = threading.Lock()
                raise error

    ours, theirs = both(pair, enter)
    assert isinstance(theirs, ValueError)
    assert "ValueError: with a lock in it" in str(ours)


def test_ranks_that_are_not_at_the_same_place_say_so(pair):
    ours, theirs = both(pair, lambda r: r.gather(None, f"place {r.rank}"))
    assert isinstance(ours, RankLostError)
    assert isinstance(theirs, RankLostError)
    assert "place 0: rank 0, 1 of 2 is not together: others are at place 1" in str(ours)


def test_a_rank_that_does_not_come_within_the_limit_is_named(pair):
    pair[0].limit_s = 0.5
    with pytest.raises(RankLostError, match="rank 1 of 2") as caught:
        pair[0].gather(None, "pushing")
    assert caught.value.ranks == (1,)


def test_a_rank_without_a_sign_of_life_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "SILENT_S", 1.0)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = Ranks(0, 2, store)
    with pytest.raises(RankLostError, match="rank 1 of 2"):
        alone.gather(None, "pushing")
    alone.close()


def test_whoever_waits_hears_at_once_what_another_rank_has_failed_with(pair):
    def run(ranks):
        with ranks.one_outcome("training"):
            if ranks.rank == 1:
                raise ValueError("out of memory")
            ranks.gather(None, "waiting")

    ours, theirs = both(pair, run)
    assert str(ours) == str(theirs) == "out of memory"
    assert ours.__notes__ == ["raised on rank 1"]


def test_after_a_failure_the_same_processes_can_train_again(pair):
    def train(ranks, failing, said):
        with ranks.one_outcome("training"):
            if ranks.rank == failing:
                raise ValueError(said)
            ranks.gather(None, "a word that the other does not say")
            return ranks.gather(ranks.rank, "the end")

    for failing, said in ((1, "first"), (1, "second"), (0, "third")):
        assert [str(each) for each in both(pair, lambda r, f=failing, s=said: train(r, f, s))] == [said] * 2
        assert both(pair, lambda r: train(r, None, "")) == [[0, 1]] * 2


def test_one_process_has_nobody_to_ask():
    alone = Ranks()
    assert alone.gather(1, "x") == [1]
    assert alone.share(lambda: 2, "x") == 2
    assert alone.in_turn(lambda: 3, "x") == 3
    with pytest.raises(ValueError, match="as it is"), alone.together("x"), alone.one_outcome("x"):
        raise ValueError("as it is")


@pytest.mark.parametrize(("rank", "held"), [(0, [0.0, 1.0]), (1, [2.0]), (2, [])])
def test_what_deepspeed_has_left_behind_the_last_number_is_no_part_of_a_weight(rank, held, monkeypatch):
    """Of three numbers on three ranks, in parts of two."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    weight = torch.empty(0)
    weight.ds_tensor = torch.tensor([*held, *[float("nan")] * (2 - len(held))])
    weight.ds_numel, weight.ds_process_group = 3, None
    assert sharded_tensors.here(weight).tolist() == held


@pytest.mark.parametrize("name", ["tools", "environment_factory", "rollout_func"])
def test_what_asks_a_common_engine_now_more_now_less_often_is_rejected(name):
    with pytest.raises(NotYetSupportedError, match=f"{name} with one engine for 2 processes.*rollout='colocate'"):
        check_turns(SimpleNamespace(world_size=2), {name: [print]})
    check_turns(SimpleNamespace(world_size=1), {name: [print]})
    check_turns(SimpleNamespace(world_size=2), {name: None})


@pytest.mark.parametrize(
    ("args", "environment", "found"),
    [
        ({"world_size": 1}, {}, "none"),
        ({}, {}, "ddp"),
        ({"fsdp": True, "fsdp_config": {}}, {}, "fsdp2"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, {}, "fsdp1"),
        ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp2"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "fsdp1"),
    ],
    ids=str,
)
def test_how_the_trainer_is_spread_is_read_as_transformers_and_accelerate_read_it(
    args, environment, found, monkeypatch
):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sharding_of(SimpleNamespace(**{"world_size": 2, **args})) == found


@pytest.mark.parametrize(
    "wish", [{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"ACCELERATE_USE_DEEPSPEED": "true"}]
)
def test_a_trainer_in_parts_on_processes_of_the_cpu_is_rejected(wish, monkeypatch):
    """accelerate would train it as DDP, whole on each process, without a word."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in wish.items():
        monkeypatch.setenv(name, value)
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    with pytest.raises(ConfigConflictError, match=r"(fsdp2|zero2) with use_cpu=True"):
        check_processes(SimpleNamespace(world_size=2, distributed_state=state), "starting the training")
