"""Pairs of sentences that say the same, or nearly: news that never happened.

A fact is a kind of event and what fills its slots. A *paraphrase* puts one fact into words twice, from two
templates: active and passive, other verbs, another order. A pair is *not equivalent* for one of the reasons
that annotators of MRPC had: one sentence tells of something more, which a small model sees soon, or one
detail differs (a number, a day, a name, who did it to whom, up or down). Then the words overlap as much as
in a paraphrase, and counting common ones is not enough: one must see *which* word differs.

    "[bought|acquired]" picks one of the words; "{buyer}" is a slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

CLASSES = ("not_equivalent", "equivalent")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PLACES = ("Boston", "Chicago", "Denver", "Geneva", "Lisbon", "London", "Madrid", "Nairobi", "Oslo", "Prague",
          "Seattle", "Sydney", "Tokyo", "Toronto", "Vienna")  # fmt: skip
FIRMS = ("Alder Foods", "Bluepeak", "Corvane", "Dunmore Steel", "Elanto", "Fairhaven Bank", "Gridline",
         "Halden Oil", "Inverra", "Juniper Air", "Kestrel Motors", "Lumora", "Marlow Paper", "Northgate",
         "Orbis Media", "Pellworth", "Quillan", "Redfern Rail", "Solvane", "Tarrant Group")  # fmt: skip
PEOPLE = ("Anna Keller", "Ben Okafor", "Clara Moss", "David Lindt", "Elena Ruiz", "Frank Osei", "Grace Hahn",
          "Hugo Marsh", "Irene Falk", "James Tully", "Karen Boyd", "Luis Prado", "Maria Stern", "Noel Adair",
          "Olga Winter", "Peter Nash")  # fmt: skip
TEAMS = ("the Badgers", "the Comets", "the Eagles", "the Falcons", "the Harbor Kings", "the Lynx",
         "the Pioneers", "the Rovers", "the Stags", "the Wolves")  # fmt: skip
MATTERS = ("a patent on batteries", "unpaid licence fees", "a cancelled contract", "the name of a product",
           "leaked documents", "late deliveries")  # fmt: skip
HAZARDS = ("fire", "storm", "gas leak", "flood", "rail accident")
WAYS = ("up", "down")
HIGH, LOW = range(61, 99), range(30, 60)  # points of a winner and of a loser


@dataclass(frozen=True)
class EventKind:
    """One kind of event: what may fill its slots, and ways to say it."""

    slots: dict[str, tuple[str, ...] | range]
    swap: tuple[str, str] | None  # two slots whose exchange makes another fact of the same words
    templates: tuple[str, ...]


KINDS = (
    EventKind(
        {"buyer": FIRMS, "bought": FIRMS, "n": range(12, 980), "day": DAYS},
        ("buyer", "bought"),
        (
            "{buyer} [bought|acquired|purchased] {bought} for ${n} million on {day}",
            "On {day}, {buyer} said it had [agreed to buy|taken over] {bought} in a deal worth ${n} million",
            "{bought} was [bought|acquired|taken over] by {buyer} on {day} [for|at a price of] ${n} million",
            "[A deal|An agreement] announced on {day} hands {bought} to {buyer} for ${n} million",
        ),
    ),
    EventKind(
        {"firm": FIRMS, "n": range(2, 40), "way": WAYS, "price": range(11, 190), "day": DAYS},
        None,
        (
            "Shares of {firm} {rose} {n} percent to ${price} on {day}",
            "{firm} stock ended {day} {up} {n} percent at ${price}",
            "On {day}, [investors sent|trading left] {firm} shares {up} by {n} percent, to ${price}",
            "{firm} [closed|finished] at ${price} on {day}, {higher} by {n} percent",
        ),
    ),
    EventKind(
        {"one": FIRMS, "other": FIRMS, "matter": MATTERS, "place": PLACES, "day": DAYS},
        ("one", "other"),
        (
            "{one} [sued|filed a suit against] {other} in {place} on {day} over {matter}",
            "{other} was [sued|taken to court] by {one} in {place} on {day} over {matter}",
            "In a suit [filed|lodged] in {place} on {day}, {one} accuses {other} in a dispute about {matter}",
            "A court in {place} received a complaint by {one} against {other} about {matter} on {day}",
        ),
    ),
    EventKind(
        {"winner": TEAMS, "loser": TEAMS, "n": HIGH, "m": LOW, "place": PLACES, "day": DAYS},
        ("winner", "loser"),
        (
            "{winner} [beat|defeated] {loser} {n} to {m} in {place} on {day}",
            "{loser} [lost|fell] to {winner} {n} to {m} on {day} in {place}",
            "On {day} in {place}, {winner} [won|prevailed] {n} to {m} against {loser}",
            "{loser} [were beaten|were defeated] in {place} on {day} by {winner}, {n} to {m}",
        ),
    ),
    EventKind(
        {"new": PEOPLE, "old": PEOPLE, "firm": FIRMS, "day": DAYS},
        ("new", "old"),
        (
            "{firm} [named|appointed] {new} chief executive on {day}, replacing {old}",
            "{new} [succeeds|takes over from] {old} as chief executive of {firm}, the company said on {day}",
            "On {day}, {old} [was replaced|was succeeded] by {new} as chief executive of {firm}",
            "{old} [steps down|leaves] as chief executive of {firm} and {new} [takes over|follows], on {day}",
        ),
    ),
    EventKind(
        {"hazard": HAZARDS, "place": PLACES, "n": range(3, 90), "day": DAYS},
        None,
        (
            "A {hazard} [injured|hurt] {n} people in {place} on {day}",
            "At least {n} people were [injured|hurt] on {day} when a {hazard} struck {place}",
            "In {place}, a {hazard} left {n} people [injured|wounded] on {day}",
            "{n} people needed treatment after {day}'s {hazard} in {place}",
        ),
    ),
)
TAILS = ("", "", ", according to [a statement|an official statement]", ", [officials|a spokesman] said",
         ", a person [familiar with the matter|close to the talks] said")  # fmt: skip
DIRECTIONS = {
    "up": {"rose": "[rose|climbed|gained]", "up": "up", "higher": "higher"},
    "down": {"rose": "[fell|slid|dropped]", "up": "down", "higher": "lower"},
}
Fact = dict[str, str]


def compose_pair(label: int, rng: np.random.Generator) -> tuple[str, str]:
    """Two sentences that say the same where `label` is 1, and do not where it is 0."""
    kind = KINDS[rng.integers(len(KINDS))]
    fact = _fact(kind, rng)
    first, second = rng.permutation(len(kind.templates))[:2]
    more = not label and rng.random() < 0.45
    other = fact if label or more else _changed(kind, fact, rng)
    sentences = [_say(kind.templates[first], fact, rng), _say(kind.templates[second], other, rng)]
    if more:
        link = _one_of(["while", "and", "as"], rng)
        sentences[rng.integers(2)] += f", {link} {_say(*_another(kind, rng), rng, inside=True)}"
    one, two = (text[0].upper() + text[1:] + "." for text in sentences)
    return one, two


def _fact(kind: EventKind, rng: np.random.Generator) -> Fact:
    fact: Fact = {}
    for slot in kind.slots:
        fact[slot] = _other(kind, slot, fact, rng)
    return fact


def _other(kind: EventKind, slot: str, fact: Fact, rng: np.random.Generator) -> str:
    """Something for `slot` that the fact does not hold yet, so no firm buys itself."""
    pool = kind.slots[slot]
    while (choice := str(pool[int(rng.integers(len(pool)))])) in fact.values():
        pass
    return choice


def _changed(kind: EventKind, fact: Fact, rng: np.random.Generator) -> Fact:
    """The fact with two of its slots exchanged, or with one filled differently."""
    if kind.swap and rng.random() < 0.35:
        one, two = kind.swap
        return fact | {one: fact[two], two: fact[one]}
    slot = list(kind.slots)[rng.integers(len(kind.slots))]
    return fact | {slot: _other(kind, slot, fact, rng)}


def _another(kind: EventKind, rng: np.random.Generator) -> tuple[str, Fact]:
    """A template and a fact of another kind."""
    other = [k for k in KINDS if k is not kind][rng.integers(len(KINDS) - 1)]
    return other.templates[rng.integers(len(other.templates))], _fact(other, rng)


def _say(template: str, fact: Fact, rng: np.random.Generator, inside: bool = False) -> str:
    """The fact in words, without a full stop; `inside` a sentence it starts with a small letter, unless a
    slot or a choice of words comes first: these keep their letters."""
    if inside:
        template = template[0].lower() + template[1:]
    else:
        template += TAILS[rng.integers(len(TAILS))]
    text = template.format(**fact, **DIRECTIONS[fact.get("way", "up")])
    return re.sub(r"\[([^]]*)\]", lambda choice: _one_of(choice[1].split("|"), rng), text)


def _one_of(words: list[str], rng: np.random.Generator) -> str:
    return words[rng.integers(len(words))]
