"""Several policies in one engine: each is pushed to, sampled and checked as if it were alone."""

import threading

import pytest
import torch
from kinds import lora
from pair import OPTIONS
from peft import get_peft_model
from support import randomise

from qlora_rl import (
    AdapterSync,
    Canary,
    CanaryError,
    EngineUnsupportedError,
    LocalEngine,
    VersionGoneError,
    borrow_base,
    export_adapter,
)
from qlora_rl.adapter.store import write_adapter
from qlora_rl.sync.in_place import InPlaceTransport

N = 8
PROMPTS = [[40 + i, 41, 42, 43 + i] for i in range(4)]
SAMPLED = {"max_tokens": 12, "temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def engine(base):
    with LocalEngine(base, **OPTIONS | {"max_lora_rank": 8, "max_num_seqs": 32}, max_loras=2 * N + 1) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(engine):
    """N adapters of one PeftModel on the engine's own base."""
    model = get_peft_model(borrow_base(engine), lora(r=4), adapter_name="a0")
    for number in range(1, N):
        model.add_adapter(f"a{number}", lora(r=4 + number % 3, lora_alpha=8 + number))
    randomise(model)
    yield model
    engine.borrowers = type(engine.borrowers)()


@pytest.fixture
def lanes(engine, model):
    """A lane and a checked strategy for each adapter, all pushed once."""
    found = []
    for number in range(N):
        model.set_adapter(f"a{number}")
        lane = engine.lane()
        sync = AdapterSync(model, lane, InPlaceTransport(), Canary(model, lane))
        sync.push()
        found.append((lane, sync))
    yield found
    for lane, sync in found:
        sync.transport.close()
        lane.close()


def at_once(calls):
    found = [None] * len(calls)

    def run(place):
        found[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_adapters_in_one_batch_sample_what_each_samples_alone(lanes):
    alone = [lane.generate(PROMPTS, **SAMPLED) for lane, _ in lanes]
    mixed = at_once([lambda lane=lane: lane.generate(PROMPTS, **SAMPLED) for lane, _ in lanes])
    assert [each.completion_ids for each in mixed] == [each.completion_ids for each in alone]
    assert len({str(each.completion_ids) for each in alone}) == N
    apart = [
        abs(a - b)
        for one, other in zip(alone, mixed, strict=True)
        for x, y in zip(one.logprobs, other.logprobs, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert max(apart) < 0.05  # bf16: other batches are added up in other orders


def test_a_push_to_one_lane_leaves_the_others_as_they_are(model, lanes):
    held = [lane.held_adapter(8) for lane, _ in lanes]
    lane, sync = lanes[3]
    for seed in range(3):
        model.set_adapter("a3")
        randomise(model, seed=10 + seed)
        assert sync.push().transport == "in_place"
    assert lane.version == 4
    assert lane.held_adapter(8) != held[3]
    assert [lane.held_adapter(8) for lane, _ in lanes if lane.version == 1] == held[:3] + held[4:]
    assert lane.generate(PROMPTS, version=3, **SAMPLED).version == 3
    with pytest.raises(VersionGoneError):
        lane.generate(PROMPTS, version=2, **SAMPLED)


def test_an_adapter_that_is_swapped_for_anothers_is_found(model, lanes):
    """What the transport writes lands in the slots of another policy, and its own serve something older."""
    (_, first), (_, second) = lanes[:2]
    model.set_adapter("a0")
    randomise(model, seed=20)
    first.transport._slots, kept = second.transport._slots, first.transport._slots
    with pytest.raises(CanaryError):
        first.push()
    first.transport._slots = kept
    first.push()
    model.set_adapter("a1")
    second.push()
    second.verify()


def test_an_engine_that_is_rebuilt_has_every_lanes_adapter(model, lanes):
    held = [lane.held_adapter(8) for lane, _ in lanes]
    lanes[0][0]._break()
    assert [lane.held_adapter(8) for lane, _ in lanes] == held
    for number in (0, 5):
        model.set_adapter(f"a{number}")
        assert [lanes[number][1].push().version for _ in range(2)] == [2, 3]


def test_slots_are_freed_and_taken_and_never_another_lanes(engine, model, lanes, tmp_path):
    with pytest.raises(EngineUnsupportedError, match="max_loras=17 < 16 \\+ 2"):
        engine.lane()
    guest = engine.lane(slots=1)
    held = [lane.held_adapter(8) for lane, _ in lanes]
    for number in (6, 7, 6):  # one slot: each takes the place of the one before
        model.set_adapter(f"a{number}")
        directory = tmp_path / f"{number}-{guest.version}"
        directory.mkdir()
        write_adapter(export_adapter(model, dtype=torch.bfloat16), directory)
        guest.load_adapter(directory, guest.version + 1)
        assert guest.held_adapter(8) == held[number]
        assert (
            guest.generate(PROMPTS, **SAMPLED).completion_ids
            == lanes[number][0].generate(PROMPTS, **SAMPLED).completion_ids
        )
    assert [lane.held_adapter(8) for lane, _ in lanes] == held
    with pytest.raises(EngineUnsupportedError, match="belong to 9 lanes"):
        engine.load_adapter(directory, 1)
    guest.close()
    engine.lane(slots=1).close()


def test_a_closed_lane_leaves_the_engine_running(engine):
    lane = engine.lane()
    with lane:
        assert lane.generate(PROMPTS, max_tokens=2).version == 0
    assert engine.generate(PROMPTS, max_tokens=2).version == 0
