"""Further prompts made from given ones: translate, summarise, answer with or without passages.

Given training prompts are mostly code and arithmetic; a head that has seen nothing else drafts badly elsewhere.
The new prompts are about the target's own answers and about the prompts themselves, so no other text is needed.
Texts in other languages are translations that the target wrote.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# First words of the names of made prompts.
SOURCES = ("translate", "back", "summarise", "answer", "digest", "search", "ask")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Chinese")
MIN_SENTENCE, MAX_SENTENCE = 30, 300  # characters
MIN_PASSAGE, MAX_PASSAGE = 200, 2500  # characters of an answer that serves as a passage
LONG_TEXT, MAX_TEXT = 1500, 4000  # characters: longer prompts are texts to summarise, MAX_TEXT of them at most
NUM_PASSAGES, MAX_OF_SEVERAL = 4, 800  # passages of a search prompt, and characters of each
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

    name: str  # kind of prompt, then the name of the prompt it was made from
    source: str  # one of SOURCES
    text: str


def widen(pairs: Sequence[PromptPair], seed: int = 0) -> Iterator[TrainPrompt]:
    """Yield prompts made from each pair, the same for the same seed.

    A pair that is a translation gives only a prompt to translate it back. Other passages of a search prompt are of
    pairs with a higher rank, and the lowest ranks are held out. So no training prompt has a held-out passage.
    """
    ranked = sorted(pairs, key=lambda pair: rank(pair.name))
    places = {pair.name: place for place, pair in enumerate(ranked)}
    for pair in pairs:
        random = Random(f"{seed} {pair.name}")  # noqa: S311 - not for secrets
        if is_translation(pair.name):
            yield from _back(pair)
        else:
            yield from _translate(pair, random)
            yield from _summarise(pair, random)
            yield from _answer(pair, random)
            yield from _search(pair, ranked[places[pair.name] + 1 :], random)
            yield from _ask(pair, random)


def is_translation(name: str) -> bool:
    """Return whether a prompt of this name was made here and asks for a translation."""
    words = name.split(" ", 2)
    return len(words) == 3 and words[0] == "translate" and words[1] in LANGUAGES


def origin(name: str) -> str:
    """Return the name of the given prompt that a prompt was made from."""
    word, _, source = name.partition(" ")
    if is_translation(name):
        return origin(name.split(" ", 2)[2])
    return origin(source) if word in SOURCES and word != SOURCES[0] and source else name


def rank(name: str) -> int:
    """Return a hash of 64 bits of a prompt's origin. The lowest are held out."""
    return int.from_bytes(hashlib.sha256(origin(name).encode()).digest()[:8], "big")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text that have a suitable length and no code."""
    found = (match.group().strip() for match in _SENTENCE.finditer(text))
    return [s for s in found if MIN_SENTENCE <= len(s) <= MAX_SENTENCE]


def names(text: str) -> list[str]:
    """Return words that look like names, each once, in the order of the text."""
    return list(dict.fromkeys(match.group() for match in _NAME.finditer(text)))


def _translate(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    known = sentences(pair.answer)
    if known:
        language, template = random.choice(LANGUAGES), random.choice([TRANSLATE[0], TRANSLATE[2]])
        text = template.format(language=language, text=random.choice(known))
        yield TrainPrompt(f"translate {language} {pair.name}", "translate", text)


def _back(pair: PromptPair) -> Iterator[TrainPrompt]:
    language, text = pair.name.split()[1], pair.answer.strip().split("\n")[0]
    if MIN_SENTENCE <= len(text) <= MAX_SENTENCE:
        yield TrainPrompt(f"back {pair.name}", "back", TRANSLATE[1].format(language=language, text=text))


def _summarise(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    if len(pair.prompt) >= LONG_TEXT and len(sentences(pair.prompt)) >= 3:
        text = random.choice(SUMMARISE).format(text=_excerpt(pair.prompt, MAX_TEXT, random))
        yield TrainPrompt(f"digest {pair.name}", "digest", text)
    if MIN_PASSAGE <= len(pair.answer) and len(sentences(pair.answer)) >= 3:
        text = random.choice(SUMMARISE).format(text=pair.answer[:MAX_PASSAGE])
        yield TrainPrompt(f"summarise {pair.name}", "summarise", text)


def _answer(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    """Yield the answer as a passage, with its prompt as the question."""
    question = pair.prompt.strip().split("\n")[0]
    if MIN_PASSAGE <= len(pair.answer) and MIN_SENTENCE <= len(question) <= MAX_SENTENCE:
        text = random.choice(ANSWER[:2]).format(text=pair.answer[:MAX_PASSAGE], question=question)
        yield TrainPrompt(f"answer {pair.name}", "answer", text)


def _search(pair: PromptPair, pairs: Sequence[PromptPair], random: Random) -> Iterator[TrainPrompt]:
    """Yield a question with several passages; one has the answer or the name asked about.

    These prompts are long, so only three in ten pairs give one. pairs: those that may give the other passages.
    """
    if not MIN_PASSAGE <= len(pair.answer) or random.random() > 0.3:
        return
    text = _passage(pair, random)
    sample = random.sample(pairs, min(len(pairs), 4 * NUM_PASSAGES))
    others = (_passage(other, random) for other in sample)
    prose = [other for other in others if len(sentences(other)) >= 2][: NUM_PASSAGES - 1]
    known, question = names(text), pair.prompt.strip().split("\n")[0]
    if known and (len(pair.prompt) >= LONG_TEXT or not MIN_SENTENCE <= len(question) <= MAX_SENTENCE):
        question = random.choice(ASK).format(name=random.choice(known))
    if len(prose) >= 2 and len(question) <= MAX_SENTENCE:
        passages = [text, *prose]
        random.shuffle(passages)
        yield TrainPrompt(f"search {pair.name}", "search", "\n\n".join([*passages, question]))


def _passage(pair: PromptPair, random: Random) -> str:
    """Return an excerpt of a long prompt, or else the beginning of the answer."""
    if len(pair.prompt) >= LONG_TEXT:
        return _excerpt(pair.prompt, MAX_OF_SEVERAL, random)
    return pair.answer[:MAX_OF_SEVERAL]


def _excerpt(text: str, max_chars: int, random: Random) -> str:
    """Return at most `max_chars` characters from a random place, beginning with a whole word."""
    start = random.randrange(max(1, len(text) - max_chars))
    return text[start : start + max_chars].partition(" ")[2]


def _ask(pair: PromptPair, random: Random) -> Iterator[TrainPrompt]:
    known = names(pair.answer) + names(pair.prompt)
    if known:
        text = random.choice(ASK).format(name=random.choice(known))
        yield TrainPrompt(f"ask {pair.name}", "ask", text)
