"""If the table has the case, it chooses the transport. For a case that the table lacks, the transport with the least
exposed time is chosen. An impossible transport is never chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.parallel.transport_plans import Exchange, choose_transport

LLAMA = Exchange(heads=32, kv_heads=8, features=128, length=65536, ranks=2)


@given(
    st.builds(
        Exchange,
        heads=st.sampled_from([8, 24, 32]),
        kv_heads=st.sampled_from([1, 2, 8]),
        features=st.sampled_from([64, 128]),
        length=st.sampled_from([256, 4096, 131072]),
        ranks=st.sampled_from([2, 3, 4, 8]),
        windows=st.booleans(),
    )
)
def test_what_is_chosen_can_do_it(exchange: Exchange) -> None:
    plan = choose_transport(exchange)
    assert plan.transport in plan.exposed_s
    assert "all_gather" in plan.exposed_s
    assert ("p2p" in plan.exposed_s) is not exchange.windows
    if exchange.heads % exchange.ranks:
        assert "a2a" not in plan.exposed_s


def test_the_table_comes_first_and_then_the_formula() -> None:
    assert choose_transport(LLAMA).reason == "fastest by the table"
    longer = choose_transport(replace(LLAMA, ranks=4))
    assert longer.reason.startswith("exposes the least communication, by the formula")
    assert longer.exposed_s[longer.transport] == min(longer.exposed_s.values())


@pytest.mark.parametrize("ranks", [4, 8])
def test_long_work_hides_rows_and_short_work_does_not(ranks: int) -> None:
    short, long = (choose_transport(replace(LLAMA, ranks=ranks, length=n)).exposed_s for n in (512 * ranks, 1 << 20))
    assert short["p2p"] > short["all_gather"]  # p2p pays its start-up time in each step
    assert long["a2a"] > long["p2p"]  # no computation overlaps with an all-to-all
