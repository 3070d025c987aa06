"""A Hugging Face dataset as a text source: a name on the hub, streamed, or a local folder of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from fullband.config import HuggingFaceSource
from fullband.data.hub import check_hub
from fullband.data.optional import optional
from fullband.data.records import RecordReader, TextRecords
from fullband.data.sources import START, Cursor, TextSource, fingerprint_files
from fullband.data.tasks import Split


class HuggingFace(TextSource):
    """A dataset's rows, read as their `text_field`. Validation is `validation_split`, else the first `validation_documents` of `split`."""

    def __init__(self, config: HuggingFaceSource, reader: RecordReader | None = None) -> None:
        """ValueError if the package datasets is missing; the dataset itself is opened when read."""
        self._datasets = optional("datasets", "data.source.kind huggingface")
        self._config = config
        self._reader = reader or TextRecords(config.text_field)
        self.where = f"dataset {config.dataset}" + (f" ({config.name})" if config.name else "")
        self.holding_out_hint = "change data.source.validation_documents, or name a data.source.validation_split"

    def documents(self, split: Split, start: Cursor = START) -> Iterator[tuple[Cursor, str]]:
        config = self._config
        first, last = 0, None
        name = config.split
        if config.validation_split is not None:
            name = config.validation_split if split == "validation" else config.split
        elif split == "validation":
            last = config.validation_documents
        else:
            first = config.validation_documents
        first = max(first, start[1])
        rows = self._rows(self._open(name).skip(first))
        if last is not None:
            rows = islice(rows, max(last - first, 0))
        for record, row in enumerate(rows, start=first):
            text = self._reader.text_of_row(row, f"{self.where}, split {name}, row {record}")
            if text.strip():
                yield (0, record), text

    def _open(self, split: str) -> Any:
        """A dataset of one split, with skip; streamed, unless the folder was written by save_to_disk."""
        config, folder = self._config, Path(self._config.dataset)
        unreachable = "" if folder.is_dir() else check_hub()
        try:
            if (folder / "state.json").is_file():
                return self._datasets.load_from_disk(str(folder))
            if (folder / "dataset_dict.json").is_file():
                return self._datasets.load_from_disk(str(folder))[split]
            return self._datasets.load_dataset(config.dataset, config.name, split=split, streaming=True)
        except Exception as error:  # the library's own, the hub's and the network's: no common base
            reason = f"{unreachable}; it is not in the cache" if unreachable else _one_line(error)
            raise ValueError(f"{self.where}, split {split}: cannot be opened ({reason})") from None

    def _rows(self, rows: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except Exception as error:  # as above
            raise ValueError(f"{self.where}: reading stopped ({_one_line(error)})") from None

    def fingerprint(self) -> dict[str, str]:
        """Names only for the hub, whose contents can't be hashed without reading them; a local folder's files otherwise."""
        config, folder = self._config, Path(self._config.dataset)
        held_out = config.validation_split or f"first {config.validation_documents}"
        source = f"huggingface {config.name or 'default'}, split {config.split}, held out {held_out}, {self._reader.describe()}"
        if folder.is_dir():
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            return {"source": source, "files": fingerprint_files(files)}
        return {"source": source, "dataset": config.dataset}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
