"""A base in parts: what several ranks hold is compared with the directory, piece by piece; and where each piece
lies."""

from types import SimpleNamespace

import pytest
import torch

from qlora_rl import compare, prepare_base
from qlora_rl.base.fingerprint import digest_bytes, digest_plain, fingerprint_stored
from qlora_rl.base.reader import StoredTensors
from qlora_rl.base.shards import Shard, join_shards
from qlora_rl.engine.worker.parallel import Place, held_digests, held_pieces, places_of

DOWN, GATE, NORM = (
    f"model.layers.1.{name}.weight" for name in ("mlp.down_proj", "mlp.gate_proj", "post_attention_layernorm")
)
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def plain(model_dir):
    return prepare_base(model_dir, "none")


def cut(plain, change=lambda rank, name, part: part):
    """What two ranks hold: columns of `down_proj` and `o_proj`, rows of all other linears and of the embedding, all of
    the rest."""
    held = [{}, {}]
    for name, whole in StoredTensors(plain.path).items():
        dim = 1 if "down_proj.weight" in name or "o_proj.weight" in name else 0
        for rank in range(2):
            if "norm" in name:
                held[rank][name] = [Shard(digest_plain(change(rank, name, whole.clone())))]
                continue
            size = -(-whole.shape[dim] // 2)
            start, stop = rank * size, min((rank + 1) * size, whole.shape[dim])
            part = whole.narrow(dim, start, stop - start).clone()
            held[rank][name] = [Shard(digest_plain(change(rank, name, part)), dim, start)]
    return held


def flipped(which, where):
    def change(rank, name, part):
        if (rank, name) == (which, where):
            part.view(torch.uint8).view(-1)[1] ^= 1
        return part

    return change


def test_the_parts_of_a_base_are_the_base(plain):
    joined = join_shards(cut(plain), plain.path)
    assert joined == fingerprint_stored(plain.path)
    assert not joined.faults


@pytest.mark.parametrize(
    ("rank", "name", "where"),
    [(1, DOWN, " in columns 128 to 255"), (0, GATE, " in rows 0 to 127"), (1, NORM, ""), (0, EMBED, " in rows 0 to")],
)
def test_a_bit_in_one_part_is_found_with_its_weight_and_its_rank(plain, rank, name, where):
    diff = compare(fingerprint_stored(plain.path), join_shards(cut(plain, flipped(rank, name)), plain.path))
    assert diff.modules == [name]
    assert diff.entries[0].how == "values"
    assert f"rank {rank} of 2 holds something else{where}" in str(diff.entries[0])


def test_what_no_rank_holds_is_found(plain):
    held = cut(plain)
    held[1][GATE] = held[0][GATE]  # a rank that has loaded the part of another one, and says so
    held[0].pop(NORM)
    joined = join_shards(held, plain.path)
    assert joined.faults == {GATE: "no rank holds rows 128 to 255", NORM: "rank 0 of 2 holds none of it"}
    assert compare(fingerprint_stored(plain.path), joined).modules == sorted([GATE, NORM])


def test_a_part_from_another_place_of_the_weight_is_another_part(plain):
    held = cut(plain)
    (shard,) = held[1][DOWN]
    held[1][DOWN] = [Shard(shard.leaf, 1, 0)]  # says that it lies in front
    assert "rank 1 of 2 holds something else in columns 0 to 127" in join_shards(held, plain.path).faults[DOWN]
    held[1][DOWN] = [Shard(shard.leaf, 1, 200)]
    assert "which is no part of (128, 256)" in join_shards(held, plain.path).faults[DOWN]


def test_a_weight_that_the_directory_lacks_is_unexpected(plain):
    held = cut(plain)
    held[0]["extra"] = held[1]["extra"] = held[0][NORM]
    diff = compare(fingerprint_stored(plain.path), join_shards(held, plain.path))
    assert [(entry.name, entry.how) for entry in diff.entries] == [("extra", "unexpected")]


def test_a_part_and_a_faulty_fingerprint_travel_as_plain_values(plain):
    import json

    joined = join_shards(cut(plain, flipped(1, DOWN)), plain.path)
    assert type(joined).from_dict(json.loads(json.dumps(joined.as_dict()))) == joined
    shard = cut(plain)[1][DOWN][0]
    assert Shard.from_dict(json.loads(json.dumps(shard.as_dict()))) == shard


def linear(rank, **fields):
    """As vLLM's layers describe themselves."""
    return SimpleNamespace(tp_rank=rank, tp_size=2, **fields)


def test_the_pieces_of_fused_and_plain_linears_lie_where_vllm_puts_them():
    row = linear(1, input_size=256, input_size_per_partition=128, output_size=64, output_size_per_partition=64)
    assert places_of(row, 1) == [[Place(1, 0, 128, 128)]]
    qkv = linear(
        1, input_size=64, output_size=256, output_size_per_partition=128, output_partition_sizes=[64, 32, 32],
        num_kv_head_replicas=1,
    )  # fmt: skip
    assert places_of(qkv, 3) == [[Place(0, 0, 64, 64)], [Place(0, 64, 32, 32)], [Place(0, 96, 32, 32)]]
    # One weight in the checkpoint (Phi-3): q, k and v were joined before they were cut.
    assert places_of(qkv, 1) == [[Place(0, 0, 64, 64), Place(0, 64, 128 + 32, 32), Place(0, 96, 128 + 64 + 32, 32)]]
    # One head of keys and values for two ranks: both hold it.
    qkv.num_kv_head_replicas = 2
    assert places_of(qkv, 3) == [[Place(0, 0, 64, 64)], [Place(0, 64, 0, 32)], [Place(0, 96, 0, 32)]]
    replicated = SimpleNamespace(input_size=64, output_size=64, tp_rank=1, tp_size=2)
    assert places_of(replicated, 1) is None
    assert places_of(torch.nn.LayerNorm(8), 1) is None
    vocabulary = SimpleNamespace(org_vocab_start_index=32, org_vocab_end_index=50)
    assert places_of(linear(1, shard_indices=vocabulary), 1) == [[Place(0, 0, 32, 18)]]


@pytest.fixture
def adapter():
    """A [4, 16] and B [32, 4] of a column-parallel and of a row-parallel linear, whole; and their layers."""
    torch.manual_seed(0)
    whole = {f"{kind}.lora_{part}.weight": torch.randn(4, 16) if part == "A" else torch.randn(32, 4)
             for kind in ("column", "row") for part in "AB"}  # fmt: skip
    layers = [
        {
            "column": linear(r, input_size=16, output_size=32, output_size_per_partition=16,
            output_partition_sizes=[16]),
            "row": linear(r, input_size=16, input_size_per_partition=8, output_size=32, output_size_per_partition=32),
        }
        for r in range(2)
    ]  # fmt: skip
    return whole, layers


def pieces(whole, layers):
    found = []
    for rank in range(2):
        places = {
            "column.lora_A.weight": whole["column.lora_A.weight"],
            "column.lora_B.weight": whole["column.lora_B.weight"][16 * rank : 16 * rank + 16],
            "row.lora_A.weight": whole["row.lora_A.weight"][:, 8 * rank : 8 * rank + 8],
            "row.lora_B.weight": whole["row.lora_B.weight"],
        }
        owners = {name: (layers[rank][name.split(".")[0]], 1, 0) for name in places}
        found.append(held_pieces(places, owners, rank))
    return found


def test_the_pieces_of_an_adapter_are_the_adapter(adapter):
    whole, layers = adapter
    assert held_digests(pieces(whole, layers)) == {name: digest_bytes(tensor) for name, tensor in whole.items()}
    whole["row.lora_B.weight"].zero_()
    assert set(held_digests(pieces(whole, layers))) == set(whole) - {"row.lora_B.weight"}


def test_what_both_ranks_hold_must_be_the_same_on_both(adapter):
    whole, layers = adapter
    held = pieces(whole, layers)
    whole["row.lora_B.weight"][0, 0] += 1
    held[1]["row.lora_B.weight"] = pieces(whole, layers)[1]["row.lora_B.weight"]
    assert "on rank 1 of 2" in held_digests(held)["row.lora_B.weight"]
