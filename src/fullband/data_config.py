"""Where a recipe's documents come from: the section `data`."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Field, field_validator, model_validator

from fullband.strict import Place, Places, Strict


class TaskSource(Strict):
    """Built-in tasks with an answer at every position: running products in a group, or running arithmetic modulo n."""

    kind: Literal["task"] = Field(default="task", description="a built-in task")
    task: Literal["group-word", "modular"] = Field(
        default="group-word", description="task: running products in a group, or running arithmetic"
    )
    group: str = Field(default="S3", description="group of the task group-word: S3, S4, S5, A4, A5 or a cyclic one such as Z7")
    modulus: int = Field(default=7, gt=1, le=1000, description="modulus of the task modular")

    @field_validator("group")
    @classmethod
    def _group_is_known(cls, group: str) -> str:
        is_cyclic = group[:1] == "Z" and group[1:].isdecimal() and group[1:] == str(int(group[1:])) and 2 <= int(group[1:]) <= 1000
        if group not in ("S3", "S4", "S5", "A4", "A5") and not is_cyclic:
            raise ValueError("must be one of S3, S4, S5, A4, A5 and Z2 to Z1000")
        return group


class FilesSource(Strict):
    """Local txt, jsonl or parquet files (txt and jsonl as .gz and .zst too). Globs are allowed."""

    kind: Literal["files"] = Field(default="files", description="local files")
    paths: Places = Field(min_length=1, description="training files; globs are allowed")
    validation_paths: Places = Field(default_factory=list, description="held-out files; globs are allowed")
    validation_fraction: float = Field(
        default=0.02, ge=0, lt=1, description="fraction of documents to hold out if there are no validation_paths"
    )
    text_field: str = Field(default="text", description='field with the text, or a pattern of several such as "{question} {answer}"')


class HuggingFaceSource(Strict):
    """A dataset of the Hugging Face hub (or a local folder of one), streamed."""

    kind: Literal["huggingface"] = Field(default="huggingface", description="a dataset of the Hugging Face hub")
    dataset: Place = Field(description="id of the dataset, or a local folder")
    name: str | None = Field(default=None, description="configuration of the dataset")
    split: str = Field(default="train", description="split to train on")
    validation_split: str | None = Field(default=None, description="held-out split")
    validation_documents: int = Field(
        default=512, gt=0, le=2**31, description="number of first documents to hold out if there is no validation_split"
    )
    text_field: str = Field(default="text", description='field with the text, or a pattern of several such as "{question} {answer}"')


class PythonStdlibSource(Strict):
    """The running interpreter's own standard library: real text on any machine, nothing downloaded."""

    kind: Literal["python-stdlib"] = Field(default="python-stdlib", description="the interpreter's own standard library")
    validation_fraction: float = Field(default=0.05, ge=0, lt=1, description="fraction of documents to hold out")


class ProgramTextSource(Strict):
    """Generated programs that ask about their own state; they contain the constructions of App. F."""

    kind: Literal["program-text"] = Field(default="program-text", description="generated programs")
    seed: int = Field(default=0, ge=0, lt=2**63, description="random seed of the programs")
    documents: int = Field(default=200_000, gt=0, le=2**31, description="number of programs in an epoch")
    updates: int = Field(default=256, gt=0, le=2**20, description="maximum number of null updates before a question")
    validation_fraction: float = Field(default=0.01, ge=0, lt=1, description="fraction of documents to hold out")


class ChatSource(Strict):
    """Conversations, from local jsonl or parquet files or a Hugging Face dataset: [{role, content}, …] in `messages_field`, or a prompt and
    its completion in two fields. Each answer becomes one document, the conversation up to it, with the loss on that answer alone."""

    kind: Literal["chat"] = Field(default="chat", description="conversations")
    paths: Places = Field(default_factory=list, description="training files; globs are allowed. Or name a dataset")
    validation_paths: Places = Field(default_factory=list, description="held-out files; globs are allowed")
    validation_fraction: float = Field(default=0.02, ge=0, lt=1, description="fraction of documents to hold out")
    dataset: Place | None = Field(default=None, description="Hugging Face dataset (id or local folder) instead of paths")
    name: str | None = Field(default=None, description="configuration of the dataset")
    split: str = Field(default="train", description="split to train on")
    validation_split: str | None = Field(default=None, description="held-out split")
    validation_documents: int = Field(
        default=512, gt=0, le=2**31, description="number of first conversations to hold out if there is no validation_split"
    )
    messages_field: str = Field(default="messages", description="field with the list of messages")
    prompt_field: str | None = Field(default=None, description="field with the prompt, instead of messages")
    completion_field: str | None = Field(default=None, description="field with the completion")
    system: str | None = Field(default=None, description="system message for conversations that have none")
    template: Place | None = Field(default=None, description="Jinja file with the chat template; default: the tokenizer's own, else ChatML")

    @model_validator(mode="after")
    def _is_complete(self) -> ChatSource:
        if bool(self.paths) == bool(self.dataset):
            raise ValueError("must name either paths or a dataset")
        if (self.prompt_field is None) != (self.completion_field is None):
            raise ValueError("prompt_field and completion_field must be given together")
        return self


class ShardsSource(Strict):
    """Folders of text as ids, which `fullband tokenize` wrote."""

    kind: Literal["shards"] = Field(default="shards", description="text that `fullband tokenize` wrote as ids")
    folders: Places = Field(min_length=1, description="folders that `fullband tokenize` wrote, with one tokenizer")
    weights: list[float] | None = Field(
        default=None, description="share of the sequences from each folder; default: by size, so that all are used up at once"
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> ShardsSource:
        if len(set(self.folders)) < len(self.folders):
            raise ValueError("folders must differ; to use one more often, give weights")
        if self.weights is not None and (len(self.weights) != len(self.folders) or min(self.weights) <= 0):
            raise ValueError(f"weights must be {len(self.folders)} numbers above 0, one for each folder, got {self.weights}")
        return self


Source = Annotated[
    Union[TaskSource, FilesSource, HuggingFaceSource, PythonStdlibSource, ProgramTextSource, ChatSource, ShardsSource],
    Field(discriminator="kind"),
]


class DataConfig(Strict):
    source: Source = Field(default_factory=PythonStdlibSource, description="where documents come from; its kind decides which keys it has")
    tokenizer: Place = Field(
        default="auto",
        description="bytes, program, tiktoken:NAME, or a tokenizer.json (or its folder); auto: the model's, that of shards, else bytes",
    )
    length: int = Field(default=512, gt=1, le=2**24, description="length of a training sequence in tokens")
    packing: bool = Field(
        default=True, description="pack several documents into a sequence; false: one each, padded, as recurrent layers need"
    )
    shuffle_documents: int = Field(
        default=1024, gt=0, le=2**31, description="documents are shuffled within blocks of this many; 1 = no shuffling"
    )
