"""AG News: words, vocabulary, sequences, files as they come, and texts divided among clients by topic."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from rayfl.data import DATASETS, IGNORED, PARTITIONS, Federation, Ragged, build_federation, fingerprint
from rayfl.data.datasets.ag_news import (
    PADDING,
    TOPICS,
    UNKNOWN,
    AgNews,
    encode,
    most_frequent,
    read_articles,
    tokenise,
)
from rayfl.data.remarks import remarks
from rayfl.errors import ConfigError, DataError

SUBJECTS = ("minister", "team", "market", "probe")


def articles(count: int) -> list[tuple[int, str]]:
    """``count`` short articles a topic, sorted by topic, as in the files that go round."""
    return [
        (topic + 1, f"The {subject} won, and {subject} number {i} lost")
        for topic, subject in enumerate(SUBJECTS)
        for i in range(count)
    ]


def write(path: Path, rows: list[tuple[int, str]], header: tuple[str, ...] = ("label", "content")) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:  # type: ignore[call-overload]
        csv.writer(file).writerows([header, *rows] if header else rows)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "ag_news" / "train.csv", articles(6))
    write(tmp_path / "ag_news" / "test.csv", articles(2))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Stocks fell 3.5% on Monday.", ["stocks", "fell", "3.5", "%", "on", "monday", "."]),
        ("a tip-off (Reuters)", ["a", "tip", "-", "off", "(", "reuters", ")"]),
        (r"an oil\pipeline\network", ["an", "oil", "pipeline", "network"]),
        ("the company #39;s unit", ["the", "company's", "unit"]),
        ("it's &#39;new&#39;", ["it's", "'", "new", "'"]),
        ("a  quot;great quot; year", ["a", '"', "great", '"', "year"]),
        ("&lt;b&gt;AT&amp;T&lt;/b&gt; <i>rose</i>", ["at", "&", "t", "rose"]),
        ("Café 1,000", ["café", "1,000"]),
        ("  ", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert tokenise(text) == words


def test_the_most_frequent_words_come_first_and_ties_in_alphabetical_order() -> None:
    assert most_frequent([["b", "a", "c"], ["c", "b", "d"], ["c"]], 3) == ["c", "b", "a"]
    assert most_frequent([["b", "a"]], 9) == ["a", "b"]


def test_sequences_by_hand() -> None:
    vocabulary = [PADDING, UNKNOWN, "a", "b", "c"]
    x, targets = encode([["a", "b", "c", "a", "b"], ["c", "rare"], ["a", "b", "b", "a"]], vocabulary, 3)
    assert x.tolist() == [[2, 3, 4], [4, 0, 0], [2, 3, 3]]
    assert targets.tolist() == [[3, 4, 2], [1, IGNORED, IGNORED], [3, 3, 2]]
    assert (x.dtype, targets.dtype) == (np.int32, np.int64)


def test_a_dataset(root: Path) -> None:
    samples = AgNews(vocabulary=8, length=5).load(root)
    assert (samples.classes, samples.class_names) == (4, TOPICS)
    assert samples.x_train.shape == (24, 5)
    assert samples.shape == (5,)
    assert samples.tokens
    # "the" 24 times, subjects 12 each and ",", "and", "lost", "won", "number" 24 each
    assert samples.vocabulary == (
        PADDING, UNKNOWN, ",", "and", "lost", "number", "the", "won", "market", "minister",
    )  # fmt: skip
    assert samples.outputs == 10
    first = [samples.vocabulary[word] for word in samples.x_train[0]]
    assert first == ["the", "minister", "won", ",", "and"]
    np.testing.assert_array_equal(samples.targets_train[:, :-1], samples.x_train[:, 1:])  # type: ignore[index]
    assert samples.y_train.tolist() == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    np.testing.assert_array_equal(samples.domain_train, samples.y_train)  # type: ignore[arg-type]
    assert samples.y_test.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_fingerprint_is_of_the_words_and_of_what_follows(root: Path) -> None:
    plain = fingerprint(AgNews(vocabulary=8, length=5).load(root))
    assert plain == fingerprint(AgNews(vocabulary=8, length=5).load(root))
    assert plain != fingerprint(AgNews(vocabulary=9, length=5).load(root))
    assert plain != fingerprint(AgNews(vocabulary=8, length=4).load(root))


def test_some_articles_are_drawn_from_all_topics(root: Path) -> None:
    write(root / "ag_news" / "train.csv", articles(100))
    samples = AgNews(samples=80, test_size=5).load(root)
    assert (len(samples.x_train), len(samples.x_test)) == (80, 5)
    assert np.bincount(samples.y_train).min() > 8


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("train.csv", (), ("3", "Title", "and text")),
        ("train.csv", ("Class Index", "Title", "Description"), ("3", "Title", "and text")),
        ("train_8000.csv.gz", ("content", "label"), ("Title and text", "3")),
    ],
)
def test_files_as_they_come(tmp_path: Path, name: str, header: tuple[str, ...], row: tuple[str, ...]) -> None:
    write(tmp_path / name, [row], header)  # type: ignore[list-item]
    write(tmp_path / "test.csv", articles(1))
    assert list(read_articles(tmp_path / name)) == [(2, "Title and text")]
    samples = AgNews().load(tmp_path)  # the files may also lie in the root itself
    assert [samples.vocabulary[word] for word in samples.x_train[0, :2]] == ["title", "and"]
    assert AgNews().available(tmp_path)


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([(1, "a b")], ("topic_id", "body"), "its columns are topic_id, body; expected topics 1 to 4"),
        ([(1, "a b")], ("label", "text", "label"), "its columns are label, text, label; expected"),
        ([(0, "a b")], ("label", "text"), r"row 2 is \['0', 'a b'\]; expected topics 1 to 4"),
        ([("World", "a b")], ("label", "text"), r"row 2 is \['World', 'a b'\]; expected"),
        ([(1, "a b"), (2,)], (), r"row 2 is \['2'\]; expected"),
        ([], (), "is empty; expected"),
        ([], ("label", "content"), "has a header and no article; expected"),
        ([(1, "alone"), (2, "")], (), "no article has two words"),
    ],
)
def test_wrong_files_are_refused_in_a_line(
    root: Path, rows: list[tuple[int, str]], header: tuple[str, ...], message: str
) -> None:
    write(root / "ag_news" / "train.csv", rows, header)
    with pytest.raises(DataError, match=message) as caught:
        AgNews().load(root)
    assert "\n" not in str(caught.value)
    assert str(root / "ag_news" / "train.csv") in str(caught.value)


def test_broken_and_missing_files_are_refused_in_a_line(tmp_path: Path, root: Path) -> None:
    folder = root / "ag_news"
    open_quote = b'1,"a b"\n2,"c d\n3,"e f"\n'  # else it would swallow the article that follows
    for broken in (b"1,\xff\xfe", b"1,a b\n" * 3 + b"\x00", b"", open_quote):
        (folder / "train.csv").write_bytes(broken)
        with pytest.raises(DataError) as caught:
            AgNews().load(root)
        assert "\n" not in str(caught.value)
    (folder / "train.csv").unlink()
    packed = bytearray(gzip.compress(b"1,a b\n2,c d\n"))
    packed[11:13] = b"\xff\xff"
    for broken in (b"no gzip", bytes(packed), bytes(packed[:20])):
        (folder / "train.csv.gz").write_bytes(broken)
        with pytest.raises(DataError, match="cannot be read as CSV"):
            AgNews().load(root)
    write(folder / "train.csv", articles(1))
    with pytest.raises(DataError, match=r"train.csv and train.csv.gz both exist; keep one"):
        AgNews().load(root)
    assert not AgNews().available(root)
    with pytest.raises(DataError, match=r"put train.csv and test.csv \(or .csv.gz\) into"):
        AgNews().load(root / "elsewhere")
    with pytest.raises(DataError, match=r"ag_news is not downloaded; put train\.csv"):
        AgNews().prepare(root / "elsewhere")


def test_impossible_settings_are_refused(root: Path) -> None:
    for settings in ({"vocabulary": 1}, {"length": 0}, {"samples": 0}):
        with pytest.raises(ConfigError):
            AgNews(**settings)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"data.samples: 25 articles wanted, .*train.csv has 24; use fewer"):
        AgNews(samples=25).load(root)
    with pytest.raises(DataError, match=r"data.test_size: 9 articles wanted"):
        AgNews(test_size=9).load(root)


def test_every_client_has_one_topic(root: Path) -> None:
    samples = AgNews(length=5).load(root)
    federation = build_federation(
        samples, PARTITIONS["domains"](clients=8), validation=0.0, test_samples="all", seed=0
    )
    assert federation.groups is not None
    assert federation.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for client in range(8):
        assert set(samples.y_train[federation.train[client]]) == {federation.groups[client]}
        assert set(samples.y_test[federation.test[client]]) == {federation.groups[client]}


def test_clients_are_tested_on_words_and_others_on_samples(root: Path) -> None:
    samples = AgNews(length=12).load(root)  # articles of 9 words: 8 have a successor
    lists = Ragged.of([np.array([0, 1, 7]), np.array([], np.int64), np.array([3])])
    assert Federation(samples, lists, lists, lists).predictions.tolist() == [24, 0, 8]
    digits = DATASETS["digits"]().load(root)
    assert Federation(digits, lists, lists, lists).predictions.tolist() == [3, 0, 1]


def test_the_real_articles(real_news: Path) -> None:
    samples = AgNews(vocabulary=2000, length=20).load(real_news)
    assert (samples.x_train.shape, samples.x_test.shape) == ((8000, 20), (7600, 20))
    assert np.bincount(samples.y_train).tolist() == [2000] * 4
    assert np.bincount(samples.y_test).tolist() == [1900] * 4
    assert samples.vocabulary[2:8] == ("the", ".", ",", "-", "a", "to")
    assert samples.targets_test is not None
    known = samples.targets_test[samples.targets_test != IGNORED]
    unknown = np.mean(known == 1)
    assert 0.15 < unknown < 0.25
    (line,) = remarks(Federation(samples, *[Ragged.of([np.arange(3)])] * 3))
    assert line.startswith(f"data: {100 * unknown:.1f} % of the words to be predicted are not among")
