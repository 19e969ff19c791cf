"""More kinds of prompts from what there is: translate, summarise, answer from passages or without.

Training prompts are mostly code and arithmetic; a draft head that has seen nothing else guesses badly elsewhere.
The texts asked about are the target's own answers and the prompts themselves, so nothing new is brought in. A text
in another language is one that the target wrote when asked to translate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The first word of a made prompt's name.
SOURCES = ("translate", "back", "summarise", "answer", "digest", "search", "ask")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Chinese")
LEAST_SENTENCE, MOST_SENTENCE = 30, 300  # characters
LEAST_PASSAGE, MOST_PASSAGE = 200, 2500
LONG_TEXT, MOST_TEXT = 1500, 4000  # a prompt that is a text of its own
NUM_PASSAGES, MOST_OF_SEVERAL = 4, 800
_SENTENCE = re.compile(r"[A-Z\"'][^.!?\n`{}<>=]{20,}[.!?](?=\s|$)")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+){0,2}")

TRANSLATE = (
    "Translate the following sentence into {language}: {text}",
    "Translate {language} to English: {text}",
    "How does one say this in {language}?\n\n{text}",
)
SUMMARISE = (
    "Summarize: {text}",
    "Write a summary of the following text in two or three sentences.\n\n{text}",
    "What are the main points of this text?\n\n{text}",
)
ANSWER = (
    "{text}\n\nQuestion: {question}\nAnswer:",
    "Answer the question with the help of the passage.\n\nPassage: {text}\n\nQuestion: {question}",
    "{question}",
)
ASK = (
    "Who is {name}?",
    "What is {name}?",
    "What is {name} known for?",
    "Where is {name}?",
    "When did {name} begin?",
    "Why is {name} important?",
    "Who was the first to write about {name}?",
    "How many people know {name}?",
)


@dataclass(frozen=True, slots=True)
class PromptPair:
    """A prompt and one answer of the target."""

    name: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class TrainPrompt:
    """A prompt made from others."""

    name: str  # says from which, and how
    source: str  # one of SOURCES
    text: str


def widen(pairs: Sequence[PromptPair], seed: int = 0) -> Iterator[TrainPrompt]:
    """Yield prompts made from each pair, the same for the same seed.

    A pair that is itself a translation is only asked to be translated back.
    """
    for pair in pairs:
        random = Random(f"{seed} {pair.name}")  # noqa: S311 - not for secrets
        if is_translation(pair.name):
            yield from _back(pair)
        else:
            yield from _translate(pair, random)
            yield from _summarise(pair, random)
            yield from _answer(pair, random)
            yield from _search(pair, pairs, random)
            yield from _ask(pair, random)


def is_translation(name: str) -> bool:
    """Whether a prompt of this name was made here and asks for a translation."""
    words = name.split(" ", 2)
    return len(words) == 3 and words[0] == "translate" and words[1] in LANGUAGES


def origin(name: str) -> str:
    """Return the name of the given prompt that a prompt was made from, by whatever steps."""
    word, _, rest = name.partition(" ")
    if is_translation(name):
        return origin(name.split(" ", 2)[2])
    return origin(rest) if word in SOURCES and word != SOURCES[0] and rest else name


def sentences(text: str) -> list[str]:
    """Return the sentences of a text that are of some length and hold no code."""
    found = (match.group().strip() for match in _SENTENCE.finditer(text))
    return [s for s in found if LEAST_SENTENCE <= len(s) <= MOST_SENTENCE]


def names(text: str) -> list[str]:
    """Return what looks like names within sentences, each once, in the order of the text."""
    return list(dict.fromkeys(match.group() for match in _NAME.finditer(text)))


def _translate(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    known = sentences(pair.answer)
    if known:
        language, template = random.choice(LANGUAGES), random.choice([TRANSLATE[0], TRANSLATE[2]])
        text = template.format(language=language, text=random.choice(known))
        yield TrainPrompt(f"translate {language} {pair.name}", "translate", text)


def _back(pair: PromptPair) -> Iterator[TrainPrompt]:
    language, text = pair.name.split()[1], pair.answer.strip().split("\n")[0]
    if LEAST_SENTENCE <= len(text) <= MOST_SENTENCE:
        yield TrainPrompt(f"back {pair.name}", "back", TRANSLATE[1].format(language=language, text=text))


def _summarise(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    if len(pair.prompt) >= LONG_TEXT and len(sentences(pair.prompt)) >= 3:
        text = random.choice(SUMMARISE).format(text=_excerpt(pair.prompt, MOST_TEXT, random))
        yield TrainPrompt(f"digest {pair.name}", "digest", text)
    if LEAST_PASSAGE <= len(pair.answer) and len(sentences(pair.answer)) >= 3:
        text = random.choice(SUMMARISE).format(text=pair.answer[:MOST_PASSAGE])
        yield TrainPrompt(f"summarise {pair.name}", "summarise", text)


def _answer(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    """A passage of several answers' kind, and the question its prompt was."""
    question = pair.prompt.strip().split("\n")[0]
    if LEAST_PASSAGE <= len(pair.answer) and LEAST_SENTENCE <= len(question) <= MOST_SENTENCE:
        text = random.choice(ANSWER[:2]).format(text=pair.answer[:MOST_PASSAGE], question=question)
        yield TrainPrompt(f"answer {pair.name}", "answer", text)


def _search(pair: PromptPair, pairs: Sequence[PromptPair], random: Random) -> Iterator[TrainPrompt]:
    """Several passages, of which one was the answer to the question or names whom it is about.

    Long, so that only a few are made.
    """
    if not LEAST_PASSAGE <= len(pair.answer) or random.random() > 0.3:
        return
    text = _passage(pair, random)
    sample = random.sample(pairs, min(len(pairs), 4 * NUM_PASSAGES))
    others = (_passage(other, random) for other in sample if other is not pair)
    prose = [other for other in others if len(sentences(other)) >= 2][: NUM_PASSAGES - 1]
    known, question = names(text), pair.prompt.strip().split("\n")[0]
    if known and (len(pair.prompt) >= LONG_TEXT or not LEAST_SENTENCE <= len(question) <= MOST_SENTENCE):
        question = random.choice(ASK).format(name=random.choice(known))
    if len(prose) >= 2 and len(question) <= MOST_SENTENCE:
        passages = [text, *prose]
        random.shuffle(passages)
        yield TrainPrompt(f"search {pair.name}", "search", "\n\n".join([*passages, question]))


def _passage(pair: PromptPair, random: Random) -> str:
    """Return some of a prompt that is a text of its own, or else of the answer."""
    if len(pair.prompt) >= LONG_TEXT:
        return _excerpt(pair.prompt, MOST_OF_SEVERAL, random)
    return pair.answer[:MOST_OF_SEVERAL]


def _excerpt(text: str, most: int, random: Random) -> str:
    """Return at most so many characters from anywhere in a text, from the start of a word on."""
    start = random.randrange(max(1, len(text) - most))
    return text[start : start + most].partition(" ")[2]


def _ask(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    known = names(pair.answer) + names(pair.prompt)
    if known:
        text = random.choice(ASK).format(name=random.choice(known))
        yield TrainPrompt(f"ask {pair.name}", "ask", text)
