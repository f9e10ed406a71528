"""AG's news (A. Gulli; in the form of Zhang, Zhao, LeCun 2015): articles on four topics, word by word."""

from __future__ import annotations

import csv
import gzip
import html
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import UNKNOWN, Dataset, Samples
from rayfl.errors import DataError, one_line
from rayfl.losses.base import IGNORED
from rayfl.random import generator

TOPICS = ("World", "Sports", "Business", "Sci/Tech")
PADDING = "<padding>"

_LABEL_COLUMNS = ("label", "class", "class index", "topic")
_TEXT_COLUMNS = ("title", "description", "content", "text")
_EXPECTED = f"expected topics 1 to {len(TOPICS)}, then texts, or a header with label and content"
_ENTITY = re.compile(r"(?<![&\w])(#\d+|quot|amp|lt|gt|nbsp);")
_TAG = re.compile(r"<[^<>]*>")
_TORN_APOSTROPHE = re.compile(r" '(s|t|d|m|re|ve|ll)\b")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+(?:[.,]\d+)*|[^\w\s]")


class AgNews(Dataset):
    """AG News: articles on World, Sports, Business and Sci/Tech, for predicting the next word.

    An article is one sample: its first ``length + 1`` words give ``length`` inputs and as many targets; the
    target of a word is the next word (many to many: one pass of a recurrent network over ``length`` words
    makes ``length`` predictions). Shorter articles are padded, and padding is ignored in losses and
    accuracies; articles of one word are left out.

    Words are in lower case, and punctuation marks are words. The vocabulary is the most frequent words of the
    training articles (ties in alphabetical order), a word for padding, and a word for all unknown words,
    which is also a target. As usual in simulations, all clients know the vocabulary from the start.

    The unknown word is easy to predict, so a small vocabulary makes perplexities low: with 8,000 training
    articles and 20 words of each, 29.6 % of the test targets are unknown for a vocabulary of 1,000 words,
    11.6 % for 5,000, 6.7 % for 10,000 and 3.8 % for 20,000. Compare perplexities of one vocabulary only.

    The label of an article is its topic, and so is its domain. With the partition ``domains`` every client
    has articles on one topic (Clustered Federated Learning, Sattler et al. 2019, section VI-C); other
    partitions divide topics like classes.

    ``root/ag_news`` (or ``root`` itself) must contain one ``train*.csv`` and one ``test*.csv``, or the same
    with the ending ``.csv.gz``: the topic 1 to 4 in the first column and texts in the others, or a header
    that names the columns.
    """

    name: Literal["ag_news"] = "ag_news"
    vocabulary: int = Field(
        5_000,
        ge=2,
        le=1_000_000,
        description="size of the vocabulary; all other words become one unknown word",
    )
    predict: Literal["words", "topic"] = Field(
        "words", description="what models predict: the word that follows each word, or an article's topic"
    )
    length: int = Field(30, ge=1, le=10_000, description="length L to which articles are cut")
    samples: int | None = Field(
        None, ge=1, description="number of training articles, drawn from all topics; by default all"
    )
    test_size: int | None = Field(None, ge=1, description="number of test articles; by default all")

    @override
    def available(self, root: Path) -> bool:
        return all(len(_part_files(root, part)) == 1 for part in ("train", "test"))

    @override
    def remedy(self, root: Path) -> str:
        return f"put train.csv and test.csv (or .csv.gz) into {root / 'ag_news'}, or set data.root"

    @override
    def own_files(self, root: Path) -> list[Path]:
        return [path for part in ("train", "test") for path in _part_files(root, part)]

    @override
    def prepare(self, root: Path) -> str:
        """Check that the files exist; nothing is downloaded.

        Raises:
            DataError: if they do not, with the folder to put them in.
        """
        if self.available(root):
            return f"{self.name}: already in {root}"
        raise DataError(f"{self.name} is not downloaded; {self.remedy(root)}")

    @override
    def load(self, root: Path) -> Samples:
        train, y_train = self._read(root, "train", self.samples)
        test, y_test = self._read(root, "test", self.test_size)
        words = (PADDING, UNKNOWN, *most_frequent(train, self.vocabulary))
        x_train, targets_train = encode(train, words, self.length)
        x_test, targets_test = encode(test, words, self.length)
        return Samples(
            self.name,
            x_train,
            y_train,
            x_test,
            y_test,
            classes=len(TOPICS),
            domain_train=y_train,
            domain_test=y_test,
            class_names=TOPICS,
            targets_train=targets_train if self.predict == "words" else None,
            targets_test=targets_test if self.predict == "words" else None,
            vocabulary=words,
        )

    def _read(self, root: Path, part: str, count: int | None) -> tuple[list[list[str]], NDArray[np.int64]]:
        """The words and the topic of ``count`` articles (or all), in the order of the file."""
        files = _part_files(root, part)
        if not files:
            raise DataError(f"dataset {self.name} is not in {root}; {self.remedy(root)}")
        if len(files) > 1:
            names = " and ".join(file.name for file in files[:2])
            raise DataError(f"{files[0].parent}: {names} both exist; keep one file of {part} articles")
        labels, texts = zip(*read_articles(files[0]), strict=True)
        articles = [tokenise(text) for text in texts]
        chosen = np.array([i for i, words in enumerate(articles) if len(words) > 1])
        if len(chosen) == 0:
            raise DataError(f"{files[0]}: no article has two words; there is nothing to predict")
        if count is not None and count > len(chosen):
            setting = "data.samples" if part == "train" else "data.test_size"
            raise DataError(f"{setting}: {count} articles wanted, {files[0]} has {len(chosen)}; use fewer")
        if count is not None:  # the file may be sorted by topic
            chosen = np.sort(generator(0, f"ag_news {part}").permutation(chosen)[:count])
        return [articles[i] for i in chosen.tolist()], np.array(labels, np.int64)[chosen]


def tokenise(text: str) -> list[str]:
    r"""The words of a text in lower case; numbers and punctuation marks are words too.

    The remains of HTML in these articles are undone first: ``&lt;b&gt;`` and ``<b>`` are dropped, ``#39;``
    and ``&#39;`` are apostrophes (``company #39;s`` is one word), a backslash is a line break.
    """
    text = html.unescape(_ENTITY.sub(r"&\1;", text))
    text = _TAG.sub(" ", html.unescape(text)).replace("\\", " ").lower()
    return _WORD.findall(_TORN_APOSTROPHE.sub(r"'\1", text))


def most_frequent(articles: Sequence[Sequence[str]], count: int) -> list[str]:
    """The ``count`` most frequent words, from the most frequent down; ties in alphabetical order."""
    counts = Counter(word for words in articles for word in words)
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def encode(
    articles: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Convert articles to indices of words.

    Args:
        articles: their words, two or more each.
        vocabulary: the first entry is for padding, the second for unknown words.
        length: L.

    Returns:
        Inputs ``(n, L)``: the index of each word in the vocabulary, 0 after the end. Targets ``(n, L)``: the
        index of the next word, :data:`~rayfl.losses.base.IGNORED` where there is none.
    """
    index_of = {word: i for i, word in enumerate(vocabulary)}
    x = np.zeros((len(articles), length), np.int32)
    targets = np.full((len(articles), length), IGNORED, np.int64)
    for row, words in enumerate(articles):
        indices = [index_of.get(word, 1) for word in words[: length + 1]]
        x[row, : len(indices) - 1], targets[row, : len(indices) - 1] = indices[:-1], indices[1:]
    return x, targets


def read_articles(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the topic (0 to 3) and the text of every article in a CSV file, which may be compressed by gzip.

    Raises:
        DataError: if it cannot be read or has other columns; one line.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file, strict=True) if row]  # a quote left open is a mistake
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV ({one_line(error)}); fetch it again") from error
    if not rows:
        raise DataError(f"{path}: is empty; {_EXPECTED}")
    label, texts, first = _columns(path, rows[0])
    if len(rows) == first:
        raise DataError(f"{path}: has a header and no article; {_EXPECTED}")
    for number, row in enumerate(rows[first:], start=first + 1):
        if len(row) != len(rows[0]) or row[label].strip() not in ("1", "2", "3", "4"):
            raise DataError(f"{path}: row {number} is {str(row)[:60]}; {_EXPECTED}")
        yield int(row[label]) - 1, " ".join(row[column] for column in texts)


def _columns(path: Path, row: list[str]) -> tuple[int, list[int], int]:
    """The columns of the topic and the texts, and the index of the first article, from the first row."""
    if row[0].strip().isdigit() and len(row) > 1:
        return 0, list(range(1, len(row))), 0
    names = [name.strip().lower() for name in row]
    labels = [i for i, name in enumerate(names) if name in _LABEL_COLUMNS]
    texts = [i for i, name in enumerate(names) if name in _TEXT_COLUMNS]
    if len(labels) != 1 or not texts:
        raise DataError(f"{path}: its columns are {', '.join(names)[:60]}; {_EXPECTED}")
    return labels[0], texts, 1


def _part_files(root: Path, part: str) -> list[Path]:
    """The files of a part, ``train`` or ``test``."""
    folder = root / "ag_news" if (root / "ag_news").is_dir() else root
    return sorted(file for end in ("csv", "csv.gz") for file in folder.glob(f"{part}*.{end}"))
