"""Text: real English without a network, the vocabulary it teaches, rows that lose nothing."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hpnb
from hpnb.data import Loader, bpe_tokenizer, byte_tokenizer, collate_texts, text, text_sources, token_cache

WORDS = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty short documents in two folders, and what is not to be read."""
    place = tmp_path / "notes"
    (place / "old").mkdir(parents=True)
    for number in range(20):
        lines = [
            f"Note {number} says in its paragraph {part} {'over and ' * part}over that it is {number * part}."
            for part in range(4)
        ]
        name = f"{'old/' if number % 3 else ''}{number:02d}.{'md' if number % 2 else 'txt'}"
        (place / name).write_text("\n\n".join(lines), encoding="utf-8")
    (place / "picture.png").write_bytes(b"\x89PNG\xff")
    return place


def words_of(dataset: hpnb.data.TextDataset) -> str:
    return str(dataset.tokenizer.decode(torch.cat([row["input_ids"] for row in dataset])))


# --- what is read ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `read` keeps its data set."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def read(home: Path) -> list[text_sources.Document]:
    """What Python's documentation is read as, while a data set of it is made where there was none."""
    found: list[text_sources.Document] = []
    plain = token_cache._make
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPNB_HOME", str(home))
        patch.setattr(
            token_cache, "_make", lambda documents, *how: found.extend(documents) or plain(documents, *how)
        )
        text("train")
    return found


def test_python_brings_english_enough_to_learn_from(
    read: list[text_sources.Document], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPNB_HOME", str(home))
    train, test = text("train"), text("test")
    assert train.describe().startswith("Python documentation: real, ")
    assert "language reference" in train.describe()
    assert train.tokens > 400_000
    assert 5 < train.tokens / test.tokens < 30  # by document: 8.8 with the documentation of Python 3.14
    assert (train.vocab_size, train.end) == (509, 508)
    ids = torch.stack([row["input_ids"] for row in train])
    assert int(ids.min()) >= 0
    assert int(ids.max()) == 508
    found = words_of(train)
    assert found.count(" the ") > 9_000  # English, and not tables
    assert len(found.encode()) / train.tokens > 1.9  # merges are worth it
    names = [document.name for document in read]
    assert {"topic strings", "module difflib.py", "module email/policy.py"} <= set(names)
    assert not any("test" in name.split("/") for name in names)


def test_it_is_made_once_and_what_is_kept_broken_is_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HPNB_HOME", str(home))
    first = text(source=folder, vocab_size=WORDS, block=16)
    (kept,) = home.glob("text-*.npz")
    monkeypatch.setattr(hpnb.data.token_cache, "_make", None)  # nothing is made: it was kept
    assert torch.equal(text(source=folder, vocab_size=WORDS, block=16)[3]["input_ids"], first[3]["input_ids"])
    monkeypatch.undo()
    monkeypatch.setenv("HPNB_HOME", str(home))
    kept.write_bytes(kept.read_bytes()[:-40])
    assert torch.equal(text(source=folder, vocab_size=WORDS, block=16)[3]["input_ids"], first[3]["input_ids"])
    (folder / "00.txt").write_text("Another text of a few words, which is long enough.")
    text(source=folder, vocab_size=WORDS, block=16)
    assert len(list(home.glob("text-*.npz"))) == 2
    monkeypatch.setenv("HPNB_HOME", "/proc/no/such/place")  # which cannot be written
    text(source=folder, vocab_size=WORDS, block=16)


SAME = """
import sys, hashlib, hpnb
d = hpnb.data.text(source=sys.argv[1], vocab_size=400, block=16)
print(hashlib.sha256(b"".join(row["input_ids"].numpy().tobytes() for row in d)).hexdigest())
"""


def test_every_process_learns_the_same_vocabulary(folder: Path, tmp_path: Path) -> None:
    own = {"HPNB_HOME": str(tmp_path), "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "5"}
    run = [sys.executable, "-c", SAME, str(folder)]
    found = subprocess.run(run, env=os.environ | own, capture_output=True, text=True, check=True).stdout
    here = b"".join(
        row["input_ids"].numpy().tobytes() for row in text(source=folder, vocab_size=400, block=16)
    )
    assert found.strip() == hashlib.sha256(here).hexdigest()


def test_files_that_are_left_out_are_counted(folder: Path) -> None:
    (folder / "old" / "empty.txt").write_text("\n \n")
    (folder / "old" / "a.PDF").write_bytes(b"%PDF")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("hidden")
    said = text(source=folder, vocab_size=WORDS, block=16).describe()
    left_out = "left out because they are not read as texts: 1 .pdf, 1 .png"
    assert said.endswith(f"from 21 files of notes (1 of them empty; {left_out}).")


def test_files_called_module_are_texts_and_hidden_folders_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "module 1 intro.md").write_text("A long and interesting text.")
    (tmp_path / "chapter 2.md").write_text("Another text.")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "LICENSE.txt").write_text("A licence.")
    (tmp_path / ".draft.md").write_text("A draft.")
    names = [document.name for document in text_sources.text_files(tmp_path).documents()]
    assert names == ["chapter 2.md", "module 1 intro.md"]


def test_documents_are_files_parts_and_modules(folder: Path, tmp_path: Path) -> None:
    documents = text_sources.text_files(folder).documents()
    assert [d.name for d in documents][:3] == ["00.txt", "03.md", "06.txt"]
    assert len(documents) == 20
    assert all(len(d.paragraphs) == 4 for d in documents)
    parts = tmp_path / "parts"
    parts.write_text(
        "A heading\n=====\n\nOne text.  \n\n\n   Indented\n   alike.<|endoftext|>Another.\r\n\r\nOne text."
    )
    first, second = text_sources.text_files(parts).documents()
    assert first.paragraphs == ("A heading\n=====", "One text.", "   Indented\n   alike.")
    assert second.paragraphs == ("Another.",)  # the rest was there before


def test_lines_of_ones_own_files_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("all:\n\tgcc -o x x.c\n---\n#\n+\ntext after\n\nThe second.")
    (document,) = text_sources.text_files(tmp_path / "a.txt").documents()
    assert document.paragraphs == ("all:\n\tgcc -o x x.c\n---\n#\n+\ntext after", "The second.")
    raw = {"topic with": b"  Heading\n  -------\n  \tSome text"}
    (topic,) = text_sources.TextSource(hpnb.data.Source("-", "real", "-"), raw, with_modules=True).documents()
    assert topic.paragraphs == ("Heading\n      Some text",)


def test_what_is_left_out_of_the_standard_library_is_not_looked_into(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where site-packages lies in it, as with conda, thousands of files there cost every page seconds."""
    for name in ("b.py", "a/c.py", "a.py", "site-packages/p/q.py", "a/test/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    looked, scandir = [], os.scandir
    monkeypatch.setattr(text_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(Path(path).name) or scandir(path))
    source = text_sources.python_documentation()
    assert source is not None
    modules = [name for name in source.raw if name.startswith("module ")]
    assert modules == ["module a/c.py", "module a.py", "module b.py"]
    assert looked == [tmp_path.name, "a"]


def test_splits_share_no_document(folder: Path) -> None:
    documents = text_sources.text_files(folder).documents()
    parts = text_sources.split_documents(documents)
    assert len(parts["test"]) == 2
    assert sorted(d.name for part in parts.values() for d in part) == sorted(d.name for d in documents)
    fewer = text_sources.split_documents(documents[:2])
    assert [len(fewer[name]) for name in ("train", "test")] == [1, 1]
    (alone,) = documents[:1]
    train, test = (text_sources.split_documents([alone])[name][0].paragraphs for name in ("train", "test"))
    assert train + test == alone.paragraphs
    assert test


def test_without_documentation_sentences_are_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "python_documentation", lambda: None)
    found = text(block=64, vocab_size=WORDS, size=20)
    assert found.describe().startswith("Composed news: generated stand-in, 20 blocks of 64 tokens of ")
    assert "without pydoc_data" in found.describe()
    with pytest.raises(FileNotFoundError, match="kind='generated'"):
        text(kind="real")


# --- rows --------------------------------------------------------------------------------------------------


def test_blocks_are_the_documents_end_to_end(folder: Path) -> None:
    found = text(source=folder, vocab_size=WORDS, block=16)
    documents = text_sources.split_documents(text_sources.text_files(folder).documents())["train"]
    whole = "<|endoftext|>".join(document.text for document in documents)
    assert (whole + "<|endoftext|>").startswith(words_of(found))
    assert len(whole) - len(words_of(found)) < 16 * 20  # less than a block is left out
    assert all(len(row["input_ids"]) == 16 and torch.equal(row["input_ids"], row["labels"]) for row in found)
    assert found.tokens == 16 * len(found)
    again = text(source=folder, vocab_size=WORDS, block=17, overlap=1)
    assert torch.equal(
        torch.cat([row["labels"][1:] for row in again]), again.rows.ids[1 : 1 + 16 * len(again)]
    )


@pytest.mark.parametrize("rows", ["paragraph", "document"])
@pytest.mark.parametrize("block", [9, 64])
def test_ragged_rows_hold_every_token(folder: Path, rows: Any, block: int) -> None:
    found = text(source=folder, vocab_size=WORDS, block=block, rows=rows)
    documents = text_sources.split_documents(text_sources.text_files(folder).documents())["train"]
    wanted = (
        [d.text for d in documents] if rows == "document" else [p for d in documents for p in d.paragraphs]
    )
    assert words_of(found).replace("<|endoftext|>", "|").rstrip("|").split("|") == wanted
    lengths = {len(row["input_ids"]) for row in found}
    assert max(lengths) <= block
    assert len(lengths) > 1
    assert found.tokens == sum(len(row["input_ids"]) for row in found)


def test_short_documents_stay_and_short_paragraphs_are_headings(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("<|endoftext|>".join(["Yes.", "No, no!", "Maybe.", *(f"Text {i}" for i in range(20))]))
    assert len(text(source=file, rows="document", tokenizer=byte_tokenizer())) == 23 - 2  # 2 are in "test"
    with pytest.raises(ValueError, match=r"no paragraph of 8 or more: .* use rows='document'"):
        text(source=file, rows="paragraph", tokenizer=byte_tokenizer())


def test_ragged_rows_are_padded_by_their_loader(folder: Path) -> None:
    found = text(source=folder, vocab_size=WORDS, block=64, rows="paragraph")
    batch = next(iter(Loader(found, 4, shuffle=False)))
    lengths = [len(found[i]["input_ids"]) for i in range(4)]
    assert len(set(lengths)) > 2
    assert batch["input_ids"].shape == (4, max(lengths))
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for row, length in enumerate(lengths):
        assert torch.equal(batch["labels"][row, :length], found[row]["input_ids"])
        assert set(batch["labels"][row, length:].tolist()) <= {-100}
        assert set(batch["input_ids"][row, length:].tolist()) <= {found.end}
    assert collate_texts(7)([found[0]])["labels"].min() >= 0
    packed = next(iter(Loader(text(source=folder, vocab_size=WORDS, block=16), 3)))
    assert {name: tuple(t.shape) for name, t in packed.items()} == {"input_ids": (3, 16), "labels": (3, 16)}


def test_all_ranks_read_the_same_and_share_the_batch(folder: Path, tmp_path: Path) -> None:
    home = str(tmp_path / "home")  # empty: the ranks meet at its lock

    def rows(source: str, home: str) -> tuple[int, torch.Tensor]:
        os.environ["HPNB_HOME"] = home
        found = hpnb.data.text(source=source, vocab_size=300, block=16)
        axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
        return len(found), next(iter(hpnb.data.Loader(found, 3, axis, seed=1)))["input_ids"]

    (n, first), (m, second) = hpnb.launch(rows, str(folder), home, ranks=2, timeout=60)
    assert n == m
    assert len(list(Path(home).glob("text-*.npz"))) == 1
    alone = next(iter(Loader(text(source=folder, vocab_size=300, block=16), 6, seed=1)))["input_ids"]
    assert torch.equal(torch.cat([first, second]), alone)


def test_python_files_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again for a vocabulary of another size, unless what was kept cannot be read."""
    monkeypatch.setenv("HPNB_HOME", str(tmp_path))
    parsed: list[bytes] = []
    parse = text_sources._docstrings

    def counting(raw: bytes) -> str:
        parsed.append(raw)
        return parse(raw)

    monkeypatch.setattr(text_sources, "_docstrings", counting)
    module = "\n".join(f'def f{i}():\n    """{f"What {i} does. " * 20}"""' for i in range(30)).encode()
    raw = {f"module {name}.py": module.replace(b"does", name.encode()) for name in ("one", "two")}
    source = text_sources.TextSource(hpnb.data.Source("Modules", "real", "two files"), raw, with_modules=True)
    token_cache.tokenize_source(source, 290)
    assert len(parsed) == 2
    fewer = token_cache.tokenize_source(source, 280)
    assert len(parsed) == 2
    (kept,) = tmp_path.glob("docstrings-*.json")
    kept.write_text("[[1]]", encoding="utf-8")
    for path in tmp_path.glob("text-*.npz"):
        path.unlink()
    again = token_cache.tokenize_source(source, 280)
    assert len(parsed) == 4
    assert torch.equal(again.splits["train"].ids, fewer.splits["train"].ids)


def test_data_sets_of_text_travel(folder: Path) -> None:
    found = text(source=folder, vocab_size=WORDS, rows="document", size=3)
    there = pickle.loads(pickle.dumps(found))
    assert words_of(there) == words_of(found)
    assert there.tokens == found.tokens
    assert repr(there) == f"<{found.describe()}>"


# --- the vocabulary ----------------------------------------------------------------------------------------


def test_ids_are_dealt_out_as_in_gpt2(folder: Path) -> None:
    found = text(source=folder, vocab_size=WORDS, block=16).tokenizer
    assert found("!Az ~\n", add_special_tokens=False)["input_ids"][:2] == [0, 32]
    assert (len(found), found.eos_token_id, found.pad_token_id) == (WORDS, WORDS - 1, WORDS - 1)
    for words in ("naïve 日本 \x00", " it is over", "a\n\n\nb"):
        assert found.decode(found(words)["input_ids"]) == words
    by_hand = bpe_tokenizer([("t", "h"), ("th", "e")], 259)
    assert by_hand("the")["input_ids"] == [257]
    assert by_hand("th")["input_ids"] == [256]
    assert byte_tokenizer()("the")["input_ids"] == [83, 71, 68]


def test_a_tokenizer_of_ones_own(folder: Path) -> None:
    found = text(source=folder, block=16, tokenizer=byte_tokenizer())
    assert (found.vocab_size, found.end) == (257, 50256)
    assert int(found[0]["input_ids"].max()) < 256
    ids = torch.cat([row["input_ids"] for row in found])
    assert (ids == 50256).sum() >= 15


def test_tokenizers_that_end_texts_in_another_way_share_no_tokens(folder: Path) -> None:
    ends = []
    for end in ("<A>", "<B>"):
        tokenizer = bpe_tokenizer((), WORDS)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<A>", "<B>"]})
        tokenizer.eos_token = end
        found = text(source=folder, block=16, tokenizer=tokenizer)
        assert (found.rows.ids == found.end).sum() == 18
        ends.append(found.end)
    assert ends[0] != ends[1]


def test_a_tokenizer_that_has_padded_and_truncated_encodes_texts_in_full(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer(["ab", "cdefgh"], padding="longest", truncation=True, max_length=4)
    plain = text(source=folder, block=16, rows="paragraph", tokenizer=byte_tokenizer())
    used = text(source=folder, block=16, rows="paragraph", tokenizer=tokenizer)
    assert used.tokens == plain.tokens
    assert tokenizer.backend_tokenizer.truncation is not None  # the reader's tokenizer stays as it is


def test_a_part_of_a_dataset_keeps_its_collate(folder: Path) -> None:
    sequences = text(source=folder, block=16, rows="paragraph", tokenizer=byte_tokenizer())
    part = torch.utils.data.Subset(sequences, range(4))
    assert next(iter(Loader(part, 4)))["input_ids"].size(0) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "validation"}, "text has no split 'validation'; it has train, test"),
        ({"rows": "line"}, "rows='line' is none of"),
        ({"block": 1}, "block=1 leaves no next token"),
        ({"block": 2, "rows": "paragraph"}, "block=2 leaves no next token .* use 3"),
        ({"overlap": 128}, "overlap=128 with rows='block'; use 0 to 127"),
        ({"rows": "document", "overlap": 1}, "overlap=1 with rows='document'"),
        ({"vocab_size": 256}, "vocab_size=256 does not hold 256 bytes .* use 257 or more"),
        ({"block": 100_000}, r"the 'train' split of Text of notes has \d+ tokens, which make no block"),
        ({"kind": "generated"}, "kind='generated' reads no source"),
        ({"kind": "some"}, "kind='some' is none of"),
        ({"size": 10**6}, r"Text of notes has \d+ samples, not 1000000"),
    ],
)
def test_what_is_not_to_be_had_is_one_sentence(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        text(**{"source": folder, **options})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is neither a file nor a folder"):
        text(source=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no \.txt, \.md, \.rst"):
        text(source=tmp_path)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 from byte 3 on; convert it or leave it out$"):
        text(source=tmp_path)
    (tmp_path / "b.md").write_bytes(b"\xff")
    said = r"a\.txt is not UTF-8 from byte 3 on, b\.md is not UTF-8 from byte 0 on; convert them"
    with pytest.raises(ValueError, match=said):
        text(source=tmp_path)
    (tmp_path / "b.md").unlink()
    (tmp_path / "a.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match="holds no words to read"):
        text(source=tmp_path)
    (tmp_path / "a.txt").write_text("One paragraph.")
    with pytest.raises(ValueError, match=r"a\.txt is one paragraph, which leaves nothing to test on"):
        text(source=tmp_path)
    with pytest.raises(ValueError, match=r"3 merges, 256 bytes .* use 260 or more"):
        bpe_tokenizer([("a", "b"), ("c", "d"), ("e", "f")], 258)
