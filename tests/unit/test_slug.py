import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagen.errors import SpecError
from dsagen.slug import MAX_SLUG_CHARS, make_slug, parse_slug, slug_symbol, symbols_for

EXAMPLE = "sparse_decode-main-mma_sync-sm_90a-kv.v32-dqk.576-dv.512-n.16-smem.227"
WORD = st.from_regex(r"[a-z][a-z0-9_]{0,11}", fullmatch=True)
VALUE = st.one_of(
    st.integers(min_value=0, max_value=10**9),
    st.from_regex(r"[a-z0-9_]{1,10}", fullmatch=True).filter(lambda text: not text.isdigit()),
)
AXES = st.lists(st.tuples(WORD, VALUE), max_size=6, unique_by=lambda axis: axis[0])
SLUG_PARTS = st.tuples(WORD, WORD, WORD, WORD, AXES)


def test_example_prints_and_parses():
    axes = (("kv", "v32"), ("dqk", 576), ("dv", 512), ("n", 16), ("smem", 227))
    assert make_slug("sparse_decode", "main", "mma_sync", "sm_90a", axes) == EXAMPLE
    parsed = parse_slug(EXAMPLE)
    assert (parsed.family, parsed.kernel, parsed.body, parsed.arch) == ("sparse_decode", "main", "mma_sync", "sm_90a")
    assert parsed.axes == axes
    assert str(parsed) == EXAMPLE


def test_symbol_of_the_example():
    symbol = "dsa_sparse_decode_main_mma_sync_sm_90a_kv_v32_dqk_576_dv_512_n_16_smem_227"
    assert slug_symbol(EXAMPLE) == symbol
    assert symbols_for([EXAMPLE]) == {EXAMPLE: symbol}


@given(SLUG_PARTS)
def test_slugs_round_trip(parts):
    slug = make_slug(*parts)
    assert set(slug) <= set(string.ascii_lowercase + string.digits + "_.-")
    parsed = parse_slug(slug)
    assert (parsed.family, parsed.kernel, parsed.body, parsed.arch, list(parsed.axes)) == parts
    assert [type(value) for _, value in parsed.axes] == [type(value) for _, value in parts[4]]
    assert slug_symbol(slug).isidentifier()


@given(SLUG_PARTS, SLUG_PARTS)
def test_different_parts_never_share_a_slug(one, other):
    assert (make_slug(*one) == make_slug(*other)) == (one == other)


@given(st.text(max_size=60))
def test_any_text_parses_back_to_itself_or_is_refused(text):
    try:
        parsed = parse_slug(text)
    except SpecError:
        return
    assert str(parsed) == text


@pytest.mark.parametrize(
    "value", [1.5, True, None, "", "V32", "a-b", "a.b", "12", "007", -1, "a b", "ä", "{{x}}", "a\n", ("a",)]
)
def test_values_that_cannot_be_keyed_are_refused(value):
    with pytest.raises(SpecError, match="axis 'kv'"):
        make_slug("f", "k", "b", "sm_80", [("kv", value)])


@pytest.mark.parametrize("word", ["", "Main", "1st", "a-b", "a.b", "_x", "a\n", None, 3])
@pytest.mark.parametrize("position", range(4))
def test_bad_words_are_refused(word, position):
    words = ["f", "k", "b", "sm_80"]
    words[position] = word
    with pytest.raises(SpecError, match="not of the form"):
        make_slug(*words, [])


def test_axis_twice_is_refused():
    with pytest.raises(SpecError, match="'n' occurs twice"):
        make_slug("f", "k", "b", "sm_80", [("n", 8), ("n", 16)])


def test_too_long_for_a_file_name_is_refused():
    with pytest.raises(SpecError, match=f"at most {MAX_SLUG_CHARS}"):
        make_slug("f", "k", "b", "sm_80", [("x", "v" * MAX_SLUG_CHARS)])


@pytest.mark.parametrize(
    "slug", ["", "a-b-c", "a-b-c-d-kv", "a-b-c-d-kv.", "a-b-c-d-n.007", "a-b-c-d-n.1-n.2", "a-b-c-d-n.8.9", "A-b-c-d"]
)
def test_what_is_no_slug_is_refused(slug):
    with pytest.raises(SpecError):
        parse_slug(slug)


def test_slugs_that_meet_in_one_symbol_are_refused():
    one, other = make_slug("f", "k", "b", "x", [("a_b", 1)]), make_slug("f", "k", "b", "x_a", [("b", 1)])
    with pytest.raises(SpecError, match="share the symbol"):
        symbols_for([one, "f-k-b-x-a.b_1"])
    with pytest.raises(SpecError, match="occurs twice"):
        symbols_for([one, one])
    with pytest.raises(SpecError, match="share the symbol"):
        symbols_for([one, other])
