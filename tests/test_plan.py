"""The plan: defaults, what lowers them, and errors that compute the answer."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift import cost
from chairlift.config import Config
from chairlift.errors import ConfigError, DoesNotFit
from chairlift.kernels.backend import BLOCK_SIZE, MemoryView
from chairlift.kernels.cpu import CPUBackend
from chairlift.models.spec import LayerSpec, ModelSpec, RopeSpec
from chairlift.plan import BackendOffer, ModelOnDisk, Plan, resolve

MIB = 1024**2
SMOL = ModelSpec(
    architecture="llama", name="SmolLM2 135M", hidden_size=576, ffn_size=1536, vocab_size=49152, context_length=8192,
    rms_eps=1e-5, layers=(LayerSpec(9, 3, 64, 64, RopeSpec(64)),) * 30,
)  # fmt: skip
WORKING = CPUBackend("none").working_bytes
ON_DISK = ModelOnDisk("smollm2", "Q4_1", 98_000_000, cost.packed_weight_bytes(98_000_000))
ROOMY = MemoryView(12 * 1024 * MIB, "the machine", "give it more")


def plan(
    config: Config | None = None, *, spec: ModelSpec = SMOL, memory: int | None = None, step_tokens: int = 128,
    notes: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    view = ROOMY if memory is None else MemoryView(memory, "the cgroup", "give the cgroup more")
    return resolve(config or Config(), spec, ON_DISK, BackendOffer(view, step_tokens, WORKING, notes))


def noted(made: Plan, words: str) -> bool:
    return any(words in note for note in made.notes)


def test_defaults_on_a_roomy_machine() -> None:
    """Defaults that drift from what the documentation says."""
    made = plan()
    assert (made.max_num_seqs, made.max_model_len, made.max_queue) == (20, 8192, 40)
    assert (made.max_num_batched_tokens, made.block_size, made.kv_dtype) == (128, 16, "bf16")
    assert made.pool_tokens == 20 * 1024
    assert made.full_conversations == 2.5
    assert made.max_gap_s is None


def test_steps_are_as_large_as_suits_the_backend_and_the_slots() -> None:
    """A backend's word ignored, or slots that were asked for cut to a default that nobody asked for."""
    assert plan(step_tokens=1024).max_num_batched_tokens == 1024
    assert plan(Config(max_num_batched_tokens=64), step_tokens=1024).max_num_batched_tokens == 64
    made = plan(Config(max_num_seqs=300))
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (300, 300)


def test_a_pool_below_all_slots_at_full_context_is_said() -> None:
    """Slots beyond what memory carries, found out by preemptions only."""
    assert noted(plan(), "20 slots exceed the 2.5 full conversations")
    assert not noted(plan(Config(kv_memory=20 * 8192 * 23040)), "exceed")


def test_layers_of_different_kinds_share_one_pool() -> None:
    """A pool sized by the first layer, in a model whose others are smaller or larger."""
    half = dataclasses.replace(SMOL.layers[0], num_kv_heads=1)
    mixed = dataclasses.replace(SMOL, layers=(*SMOL.layers[:10], *(half,) * 20))
    made, alike = plan(Config(kv_memory=64 * MIB), spec=mixed), plan(Config(kv_memory=64 * MIB))
    assert (alike.kv_bytes_per_token, made.kv_bytes_per_token) == (23040, 10 * 768 + 20 * 256)
    assert made.pool_bytes <= 64 * MIB < made.pool_bytes + BLOCK_SIZE * made.kv_bytes_per_token
    assert made.num_blocks == 64 * MIB // (16 * 12800)


def test_short_contexts_get_a_pool_for_all_slots() -> None:
    """Eight people preempting one another with gigabytes free."""
    made = plan(Config(max_model_len=1024))
    assert made.pool_tokens == 20 * 1024
    assert made.notes == ()


def test_long_models_are_cut_to_8192_unless_asked() -> None:
    """A 128k model that reserves memory for 128k because nobody said otherwise."""
    long = dataclasses.replace(SMOL, context_length=131072)
    assert plan(spec=long).max_model_len == 8192
    assert noted(plan(spec=long), "8192 of the model's 131072")
    assert plan(Config(max_model_len=32768), spec=long).max_model_len == 32768


def test_context_beyond_the_model_is_refused() -> None:
    """Positions that the model was never trained for."""
    with pytest.raises(ConfigError, match="trained for 8192"):
        plan(Config(max_model_len=8193))


def test_context_never_exceeds_the_pool() -> None:
    """A request that is let in and can never run."""
    made = plan(Config(kv_memory=64 * BLOCK_SIZE * 23040, max_model_len=4096))
    assert (made.num_blocks, made.max_model_len) == (64, 1024)
    assert noted(made, "context lowered from 4096 to 1024")


def test_slots_are_lowered_to_what_memory_carries() -> None:
    """Twenty slots on memory for two: nothing but preemptions."""
    room = cost.packed_weight_bytes(ON_DISK.weight_bytes) + 160 * MIB
    made = plan(memory=int(room + 2.5 * 8192 * 23040 / 0.6))
    assert made.max_num_seqs == 2
    assert noted(made, "slots lowered from 20 to 2")
    assert noted(plan(Config(max_num_seqs=8), memory=made.pool_bytes * 3), "8 slots exceed")


def test_a_small_machine_gets_a_small_context() -> None:
    """A start that fails where a shorter context would have done."""
    made = plan(memory=300 * MIB)
    assert 256 <= made.max_model_len < 8192
    assert made.max_model_len == made.pool_tokens
    assert noted(made, "context lowered")


def test_steps_smaller_than_slots_lower_the_slots() -> None:
    """A running request that no step has room for."""
    made = plan(Config(max_num_batched_tokens=4))
    assert (made.max_num_batched_tokens, made.max_num_seqs, made.max_queue) == (4, 4, 8)
    assert noted(made, "a step carries no more")


def test_serial_has_one_slot() -> None:
    """A plan that promises more than the policy gives."""
    assert plan(Config(batching="serial")).max_num_seqs == 1


def test_weights_that_do_not_fit_fail_before_loading() -> None:
    """Killed by the kernel half way through loading, without a word."""
    with pytest.raises(DoesNotFit) as caught:
        plan(memory=200 * MIB)
    assert all(
        word in str(caught.value) for word in ("needed", "200 MiB available", "the cgroup", "of weights", "give the")
    )


def test_a_backend_that_unpacks_its_weights_needs_room_for_them() -> None:
    """A bound of one backend taken for all: weights decoded to 16 bits are several times the file."""
    decoded = dataclasses.replace(ON_DISK, packed_bytes=4 * ON_DISK.weight_bytes)
    view = MemoryView(400 * MIB, "the device", "use a larger one")
    assert resolve(Config(), SMOL, ON_DISK, BackendOffer(view, 128, WORKING)).num_blocks > 0
    with pytest.raises(DoesNotFit, match=r"weights 374 MiB.*with at most 65\.\d MiB of weights, or use a larger one"):
        resolve(Config(), SMOL, decoded, BackendOffer(view, 128, WORKING))


def test_no_room_for_any_context() -> None:
    """An error that does not say which flag would help."""
    weights = cost.packed_weight_bytes(ON_DISK.weight_bytes)
    working = plan_working_bytes()
    with pytest.raises(DoesNotFit, match="--memory-utilization"):
        plan(memory=weights + working + 6 * MIB)


def plan_working_bytes() -> int:
    """Least memory at which the weights alone fit, less the weights."""
    low, high = 100 * MIB, 1024 * MIB
    while high - low > MIB:
        middle = (low + high) // 2
        try:
            plan(Config(kv_memory=16 * 23040), memory=middle)
            high = middle
        except DoesNotFit:
            low = middle
    return high - cost.packed_weight_bytes(ON_DISK.weight_bytes)


def test_kv_memory_that_does_not_fit_says_what_would() -> None:
    """A guess-again error; what it offers must itself work."""
    with pytest.raises(DoesNotFit) as caught:
        plan(Config(kv_memory=64 * 1024 * MIB))
    offered = int(str(caught.value).split("at most --kv-memory ")[1].split("MiB")[0])
    assert plan(Config(kv_memory=offered * MIB)).pool_bytes > (offered - 1) * MIB
    with pytest.raises(DoesNotFit):
        plan(Config(kv_memory=(offered + 1) * MIB))


def test_kv_memory_below_a_block() -> None:
    """A pool of no blocks."""
    with pytest.raises(ConfigError, match="one block of 16 tokens takes 368640 bytes"):
        plan(Config(kv_memory=368639))
    assert plan(Config(kv_memory=368640)).num_blocks == 1


def test_what_the_backend_had_to_lower_is_said_first() -> None:
    """A note of the backend that never reaches the start card."""
    made = plan(Config(max_num_seqs=300), notes=("threads lowered",))
    assert made.notes[0] == "threads lowered"
    assert len(made.notes) > 1


def test_a_context_cut_by_the_model_says_why() -> None:
    """A context below what the model was trained for, and the reason lost; a refusal that blames the training."""
    short = dataclasses.replace(SMOL, context_length=4096, context_note="context is 4096 of 32768: a window")
    assert noted(plan(spec=short), "context is 4096 of 32768: a window")
    with pytest.raises(ConfigError, match="--max-model-len 8192: context is 4096 of 32768: a window"):
        plan(Config(max_model_len=8192), spec=short)


def test_what_was_asked_is_carried_over() -> None:
    """A setting that never reaches the engine."""
    made = plan(
        Config(max_num_seqs=3, max_queue=0, max_gap_ms=50.0, watchdog_s=7.0, prefix_caching=False,
               batching="static", kv_cache_dtype="int8")
    )  # fmt: skip
    assert (made.max_num_seqs, made.max_queue, made.max_gap_s, made.watchdog_s) == (3, 0, 0.05, 7.0)
    assert (made.prefix_caching, made.batching, made.kv_dtype) == (False, "static", "int8")
    assert made.kv_bytes_per_token == 30 * 3 * 136


@settings(deadline=None)
@given(
    memory=st.integers(0, 40_000 * MIB),
    utilization=st.floats(0.01, 0.95),
    slots=st.none() | st.integers(1, 64),
    length=st.none() | st.integers(16, 8192),
    tokens=st.none() | st.integers(1, 2048),
    kv_memory=st.none() | st.integers(1, 8000 * MIB),
)
def test_every_plan_holds_together(
    memory: int, utilization: float, slots: int | None, length: int | None, tokens: int | None, kv_memory: int | None
) -> None:
    """A plan whose parts contradict one another: the engine trusts it without a check."""
    config = Config(
        memory_utilization=utilization, max_num_seqs=slots, max_model_len=length, max_num_batched_tokens=tokens,
        kv_memory=kv_memory,
    )  # fmt: skip
    try:
        made = plan(config, memory=memory)
    except (DoesNotFit, ConfigError):
        return
    assert 1 <= made.max_model_len <= made.pool_tokens
    assert made.max_model_len <= min(8192, length or 8192)
    assert 1 <= made.max_num_seqs <= made.max_num_batched_tokens
    left = memory - cost.packed_weight_bytes(ON_DISK.weight_bytes)
    assert made.pool_bytes <= (left * utilization if kv_memory is None else kv_memory)
    assert made.pool_bytes < left
