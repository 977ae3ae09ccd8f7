"""Page keys must be SGLang's own, or no mapped page is ever found."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapper.keys import Namespace, page_keys

ids = st.lists(st.integers(0, 2**32 - 1), max_size=80)
names = st.none() | st.text(max_size=12)
salts = st.none() | st.text(min_size=1, max_size=12)


@pytest.fixture(scope="module")
def sglang_keys():
    from mapper.sglang_plugin.standins import install

    install()
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    def keys(tokens, page_size, namespace):
        whole = tokens[: len(tokens) // page_size * page_size]
        if not whole:
            return []
        key = RadixKey(
            array("q", whole), extra_key=namespace.extra_key, cache_salt=namespace.cache_salt
        )
        return get_storage_hash_str(key, None, page_size=page_size)

    return keys


@given(tokens=ids, page_size=st.integers(1, 33), extra_key=names, salt=salts)
def test_parity_with_sglang(sglang_keys, tokens, page_size, extra_key, salt):
    namespace = Namespace(extra_key, salt)
    assert page_keys(tokens, page_size, namespace) == sglang_keys(tokens, page_size, namespace)


@given(
    tokens=st.lists(st.integers(0, 99), min_size=4, max_size=40), a=names, b=salts, c=names, d=salts
)
def test_namespaces_never_share_a_key(tokens, a, b, c, d):
    one, other = Namespace(a, b), Namespace(c, d)
    shared = set(page_keys(tokens, 4, one)) & set(page_keys(tokens, 4, other))
    assert bool(shared) == (one == other)


@given(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=40), data=st.data())
def test_a_changed_token_changes_its_page_and_all_after_it(tokens, data):
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    before, after = (page_keys(t, 4, Namespace()) for t in (tokens, changed))
    same = [x == y for x, y in zip(before, after, strict=True)]
    assert same == [index < at // 4 for index in range(len(before))]


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_refuses_ids_that_do_not_fit(bad):
    with pytest.raises(ValueError, match="32"):
        page_keys(bad, 1, Namespace())


def test_refuses_an_empty_salt():
    with pytest.raises(ValueError, match="cache_salt"):
        Namespace("lineage", "")
