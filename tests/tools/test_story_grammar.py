"""Tests of the story grammar: what its texts promise a reader and a training run; not of the trained model."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

GRAMMAR_FILE = Path(__file__).resolve().parents[2] / "tools" / "story_grammar.py"
SEEDS = range(3000)
PINNED_STORY = (
    "The girl was on the hill. Her name was Julia, and she was very busy. That day, Bubbles did not come to "
    'play. "Where is Bubbles?" asked Julia. "She is ill," said her grandma. Julia wanted to make Bubbles '
    "smile. She put cheese and a wooden box in a basket. On the road, Julia met Winirro the lion. Winirro was "
    "so hungry, and Julia gave him everything. Julia came to Bubbles's house with wet feet. \"I have nothing "
    'for you," she said, "only a song." Bubbles sat up in bed. "You came! That is the best medicine," she '
    "said. Julia read a book to her, and Bubbles laughed and laughed. Soon, Bubbles was well again, and they "
    "went to the hill together. And they were all very happy."
)


@pytest.fixture(scope="module")
def grammar() -> ModuleType:
    spec = importlib.util.spec_from_file_location("story_grammar", GRAMMAR_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stories(grammar: ModuleType) -> list[str]:
    return [grammar.story(seed) for seed in SEEDS]


def test_a_seed_always_gives_the_same_story(grammar: ModuleType, stories: list[str]) -> None:
    assert [grammar.story(seed) for seed in range(50)] == stories[:50]


def test_the_story_of_a_seed_is_the_one_the_shipped_weights_were_trained_on(stories: list[str]) -> None:
    assert stories[0] == PINNED_STORY


def test_stories_of_different_seeds_differ(stories: list[str]) -> None:
    assert len(set(stories)) == len(stories)


def test_held_out_seeds_share_no_story_with_the_first_training_seeds(grammar: ModuleType, stories: list[str]) -> None:
    assert not {grammar.story(1_000_000_000 + seed) for seed in range(500)} & set(stories)


def test_every_story_is_of_a_length_that_fits_half_the_context(stories: list[str]) -> None:
    lengths = [len(text.split()) for text in stories]
    assert min(lengths) >= 35
    assert max(lengths) <= 250
    assert 90 <= sorted(lengths)[len(lengths) // 2] <= 140


@pytest.mark.parametrize(
    ("mistake", "pattern"),
    [
        ("template syntax is left over", r"[\[\]{}|]"),
        ("a space is doubled, leading or trailing", r"  |^ | $| \n|\n "),
        ("a space stands before punctuation", r" [,.!?]"),
        ("a word is repeated", r"\b([a-z]+) \1\b"),
        ("a sentence starts in lower case", r"(^|\n|[a-z]\. |\.\" )\"?[a-z]"),
        ("the article does not fit the next letter", r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]"),
        ("two marks end a sentence", r"[!?,][.,!?]|(?<!\.)\.\.(?!\.)"),
    ],
)
def test_no_story_has_the_mistake(stories: list[str], mistake: str, pattern: str) -> None:
    assert not [text for text in stories if re.search(pattern, text)], mistake


def test_every_story_ends_with_a_finished_sentence_and_closed_quotes(stories: list[str]) -> None:
    for text in stories:
        assert re.search(r"[.!?]\"?$", text), text
        assert text.count('"') % 2 == 0, text


def test_a_character_has_the_pronouns_of_one_gender(grammar: ModuleType) -> None:
    """Every form of the pronoun in a slot belongs to one gender."""
    for seed in range(500):
        slots = grammar.draw_slots(random.Random(seed))
        for name in "ABCM":
            forms = tuple(slots[name][form] for form in ("he", "his", "him", "himself"))
            assert forms in {("he", "his", "him", "himself"), ("she", "her", "her", "herself")}


def test_the_characters_of_a_story_have_different_names(grammar: ModuleType) -> None:
    for seed in range(500):
        slots = grammar.draw_slots(random.Random(seed))
        assert len({slots[name]["name"] for name in "ABC"}) == 3, seed


def test_a_character_is_introduced_once_and_then_named(grammar: ModuleType) -> None:
    slots = {"B": {"name": "the fox", "full": "a small fox", "intro": "a small fox", "proper": "Rusty"}}
    mentioned: set[str] = set()
    rng = random.Random(0)
    assert grammar.expand("{B} saw {B.full}.", slots, mentioned, rng) == "a small fox saw the fox."
    assert grammar.expand("{B.proper} is {B.full}.", slots, mentioned, rng) == "Rusty is Rusty."


def test_a_nested_choice_gives_each_of_its_alternatives(grammar: ModuleType) -> None:
    rng = random.Random(0)
    seen = {grammar.expand("[a|b [c|d]]", {}, set(), rng) for _ in range(200)}
    assert seen == {"a", "b c", "b d"}


def test_an_unknown_slot_of_a_template_is_an_error(grammar: ModuleType) -> None:
    with pytest.raises(KeyError):
        grammar.expand("{nobody}", {}, set(), random.Random(0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"where is it?" asked Tom. he ran.', '"Where is it?" asked Tom. He ran.'),
        ('"oh!" he said. "come!" they ran.', '"Oh!" he said. "Come!" They ran.'),
        ('she said, "it is late." then she slept.', 'She said, "it is late." Then she slept.'),
        ("one.\n\ntwo.", "One.\n\nTwo."),
    ],
)
def test_capitals_stand_at_sentence_starts_and_not_at_speech_tags(
    grammar: ModuleType, text: str, expected: str
) -> None:
    assert grammar.capitalize_sentences(text) == expected


def test_every_plot_can_be_told_without_an_unknown_slot(grammar: ModuleType) -> None:
    """Every alternative of every beat, with all its choices, names only slots that a story has."""
    slots = grammar.draw_slots(random.Random(0)) | {name: {"name": "x"} for name in ("when", "night", "evening")}
    beats = [beat for plot in grammar.PLOTS.values() for beat in plot]
    beats += [grammar.OPENINGS_CALM, grammar.OPENINGS_SUDDEN, grammar.FILLERS, grammar.CLOSINGS]
    for template in (template for beat in beats for template in beat):
        for slot, form in re.findall(r"\{([A-Za-z_]+)(?:\.([A-Za-z_0-9]+))?\}", template):
            assert (form or "name").lower() in slots[slot], template


def test_a_name_drill_keeps_to_its_two_characters(grammar: ModuleType) -> None:
    for seed in range(300):
        slots = grammar.draw_slots(random.Random(seed))
        text = grammar.name_drill(seed)
        assert re.search(r"[.!?]\"?$", text), text
        assert 3 <= len(re.findall(r"[.!?]", text)) <= 30, text
        assert slots["C"]["proper"] not in text.split(), text


def test_no_invented_name_spells_a_rude_word(grammar: ModuleType) -> None:
    rude = re.compile(
        "sex|fart|penis|kike|pedo|nazi|porn|rape|anus|slut|fuck|shit|dick|cock|nig|fag|fat|piss|cunt|derp"
    )
    middles = ("", *grammar.SYLLABLES_MIDDLE)
    names = [
        (start + middle + end).lower()
        for ends in grammar.SYLLABLES_END.values()
        for start in grammar.SYLLABLES_START
        for middle in middles
        for end in ends
    ]
    assert len(names) > 5000
    assert not [name for name in names if rude.search(name)]
