"""Settings: read once from the environment (`PREREAD_*`) and an optional TOML file, frozen, passed down.

pydantic stays inside this module.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from service.errors import Invalid
from service.paths import expanded

MIB = 1 << 20
GIB = 1 << 30


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/preread`, else `~/.local/share/preread`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "preread"


class Settings(BaseSettings):
    """Everything an operator can choose. `PREREAD_CONFIG` names a TOML file; the environment wins over it."""

    model_config = SettingsConfigDict(env_prefix="PREREAD_", frozen=True, extra="forbid", env_ignore_empty=True)

    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Files, snapshots, models and the database live below it.",
    )
    model: str = Field("demo", description="Name of an imported model, or a path to its directory.")
    engine: Literal["torch", "exl2", "llamacpp", "fake"] = Field(
        "torch",
        description="`torch`; `exl2`, on an NVIDIA card; `llamacpp`, for a GGUF; or `fake`, no model, to try the API.",
    )
    compute_dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "auto", description="Weights and compute of the torch engine."
    )
    kv_type: Literal["fp16", "k8v8", "k8v4", "k4v4"] = Field("k8v4", description="How keys and values are stored.")
    threads: int = Field(0, ge=0, description="Compute threads of the engine; 0 takes every core.")
    max_context: int = Field(
        0, ge=0, description="Tokens of document, turns and answer together; 0 takes the model's own."
    )
    max_batch: int = Field(4, ge=1, le=256, description="Answers computed in one forward.")
    engine_timeout_s: float = Field(
        30.0, ge=0, description="An engine process that says nothing for so long is killed and started again; 0: never."
    )
    fetch_rounds: int = Field(
        1,
        ge=1,
        le=2,
        description="2 looks once more in windowed documents, for what the best passage names, when that recurs.",
    )
    citation_attention: bool = Field(
        True, description="Cite also by what the model looked at while it wrote an answer, not by the words alone."
    )
    speculation: Literal["auto", "on", "off"] = Field(
        "auto",
        description="`on`: several tokens at once where an answer quotes the document; `off`: one a step. `auto` is "
        "`on` where that was measured to pay: with the torch and the exl2 engine.",
    )
    draft_model: str = Field(
        "",
        description="Name of a small imported model with the same tokens, or its directory, that guesses how an answer "
        "goes on; with the torch and the exl2 engine. Empty: none.",
    )
    resident_bytes: int = Field(
        2 * GIB,
        ge=0,
        description="Memory for documents' KV kept between questions, of the torch and the llamacpp engine.",
    )
    offload: Literal["auto", "all", "none"] = Field(
        "auto",
        description="Of the llamacpp engine: `all` layers on a GPU or no start, `none`, or `auto`: all where it can.",
    )
    gpu_reserve_bytes: int = Field(
        GIB, ge=0, description="Memory of the card left free; documents get the rest, of the exl2 engine."
    )
    host_bytes: int = Field(
        8 * GIB,
        ge=0,
        description="Page-locked memory for documents that have to leave the card, of the exl2 engine; 0 is none.",
    )
    attention_backend: Literal["auto", "triton", "portable"] = Field(
        "auto", description="Attention of the exl2 engine: kernels for sm_80 and newer, or plain torch."
    )
    product: Literal["auto", "triton", "exllamav2"] = Field(
        "auto", description="Products of few rows with quantized weights, of the exl2 engine: ours or exllamav2's."
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8420, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    allow_remote: bool = Field(
        False, description="Listen on an address others can reach, though no API key was ever made."
    )
    admin_key_file: str = Field(
        "",
        description="File with the first API key, made by `preread keys new`. PREREAD_ADMIN_KEY is the key itself.",
    )
    allowed_hosts: str = Field(
        "", description="Names, with commas between, that requests may be for beside this machine's own; `*` is any."
    )
    shutdown_grace_s: float = Field(5.0, gt=0, description="Time open requests get to end after SIGTERM.")

    database_url: str = Field("", description="`postgresql://user:password@host/name`; empty: SQLite.")
    max_upload_bytes: int = Field(200 * MIB, gt=0, description="Largest accepted file.")
    max_pages: int = Field(5000, gt=0, description="Most pages of a document.")
    parse_concurrency: int = Field(1, ge=1, le=16, description="Documents parsed at the same time.")
    parse_timeout_s: float = Field(900.0, gt=0, description="Longest time one document may be parsed.")
    parse_memory_bytes: int = Field(2 * GIB, gt=0, description="Memory of the parsing process.")
    max_unpacked_bytes: int = Field(GIB, gt=0, description="What a packed document (DOCX, EPUB) may unpack to.")
    max_markup_bytes: int = Field(
        64 * MIB, gt=0, description="Largest part with text of a packed document, and largest page of HTML."
    )
    ocr_languages: str = Field(
        "eng",
        pattern=r"^[A-Za-z0-9_/]+(\+[A-Za-z0-9_/]+)*$",
        description="Languages of scanned pages as Tesseract names them (`eng+deu`); `none`: scans are not read.",
    )
    ocr_page_timeout_s: float = Field(45.0, gt=0, description="Longest time text recognition has for one page.")
    answer_room_tokens: int = Field(768, gt=0, description="Tokens of the context kept free for question and answer.")
    segment_tokens: int = Field(
        2048, ge=256, description="Longest part in which a document that does not fit the context is read."
    )
    max_document_tokens: int = Field(
        1_000_000, ge=1, description="Longest document of which only a part stays in memory."
    )
    snapshot_budget_bytes: int = Field(0, ge=0, description="Disk for snapshots; 0 is no limit.")
    redis_url: str = Field(
        "", description="Redis that keeps snapshots hot for all hosts, as `redis://host:6379/0`; empty is none."
    )
    redis_budget_bytes: int = Field(
        0, ge=0, description="Memory of Redis for snapshots; 0 is nine tenths of its `maxmemory`, where it has one."
    )
    redis_ttl_s: int = Field(86_400, gt=0, description="How long Redis keeps a snapshot that nobody asks about.")
    object_url: str = Field(
        "",
        description="Object store where snapshots outlive the host: `s3://bucket/prefix`, `gs://`, `az://`, `file://`.",
    )
    object_budget_bytes: int = Field(0, ge=0, description="Bytes of snapshots in the object store; 0 is no limit.")
    fleet_url: str = Field(
        "",
        description="Redis in which workers register, as `redis://host:6379/1`: `serve` uses them. Empty: one machine.",
    )
    fleet_heartbeat_s: float = Field(
        1.0, gt=0, description="How often workers say that they live; lost after three times that."
    )
    worker_grace_s: float = Field(30.0, ge=0, description="Time a worker's open requests get to end after SIGTERM.")
    lease_s: float = Field(
        10.0, gt=0, description="A server that shares its database gives up another one after this silence."
    )
    encryption_key_file: str = Field(
        "",
        description="File with a key of 32 bytes: snapshots are encrypted. PREREAD_ENCRYPTION_KEY is the key itself.",
    )
    free_floor_bytes: int = Field(512 * MIB, ge=0, description="Free disk that is never used up.")
    sweep_interval_s: float = Field(60.0, gt=0, description="How often expired documents are removed.")

    max_session_documents: int = Field(16, ge=1, le=64, description="Most documents of one session.")
    queue_limit: int = Field(32, ge=1, description="Answers running and waiting; more get 429.")
    max_answer_tokens: int = Field(4096, ge=1, description="Largest `max_tokens` of a question.")
    quota_documents: int = Field(0, ge=0, description="Documents of one owner; 0 is no limit.")
    quota_bytes: int = Field(0, ge=0, description="Bytes of one owner's documents; 0 is no limit.")
    quota_tokens_per_day: int = Field(
        0, ge=0, description="Tokens computed for one owner a day (UTC), without what is reused; 0 is no limit."
    )
    quota_questions: int = Field(0, ge=0, description="Questions of one owner answered at a time; 0 is no limit.")
    rate_per_minute: int = Field(0, ge=0, description="Requests of one owner a minute; 0 is no limit.")
    rate_burst: int = Field(0, ge=0, description="Of these so many at once; 0 is those of a minute.")
    audit_days: int = Field(90, ge=1, description="Days for which the audit log is kept.")
    prompt_tokens: int = Field(
        1024,
        ge=0,
        description="A text of a chat without a document that is so long, and comes again, becomes one; 0: none.",
    )
    prompt_repeats: int = Field(2, ge=1, description="After how many times it does.")
    chat_ttl_s: float = Field(
        604_800.0,
        ge=60,
        description="What chats made (sessions, files in requests, repeated texts) goes so long unused.",
    )
    chat_wait_s: float = Field(
        600.0, gt=0, description="How long a chat request waits for a document that is still being read."
    )
    disconnect_grace_s: float = Field(10.0, ge=0, description="How long an answer goes on without a reader.")
    sse_heartbeat_s: float = Field(15.0, gt=0, description="A comment is sent on streams this long quiet.")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe message logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="`auto`: console on a terminal, else JSON."
    )

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return expanded(value, "PREREAD_DATA_DIR").absolute()

    @property
    def files_dir(self) -> Path:
        """Uploaded originals, one file per document id."""
        return self.data_dir / "files"

    @property
    def store_dir(self) -> Path:
        """Root of the snapshot store."""
        return self.data_dir / "store"

    @property
    def models_dir(self) -> Path:
        """Imported models, one directory per name."""
        return self.data_dir / "models"

    @property
    def model_dir(self) -> Path:
        """The chosen model: a path when `model` looks like one, else its name below `models_dir`."""
        return self._model_dir(self.model, "PREREAD_MODEL")

    @property
    def draft_model_dir(self) -> Path | None:
        """The model that guesses, found as `model_dir` is; None without one."""
        return self._model_dir(self.draft_model, "PREREAD_DRAFT_MODEL") if self.draft_model else None

    def _model_dir(self, model: str, setting: str) -> Path:
        path = expanded(model, setting)
        return path.absolute() if path.is_absolute() or "/" in model else self.models_dir / model

    @property
    def is_shared(self) -> bool:
        """Whether other processes can work on the same database."""
        return bool(self.fleet_url) or not self.sqlalchemy_url.startswith("sqlite")

    @property
    def sqlalchemy_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir / 'preread.sqlite3'}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = _config_file(settings_cls) if os.environ.get("PREREAD_CONFIG") else ()
        return init_settings, env_settings, *toml


def _config_file(settings_cls: type[BaseSettings]) -> tuple[PydanticBaseSettingsSource]:
    """Raises Invalid for a file that is no TOML, or cannot be read: pydantic ignores it if
    missing, and the server would run with settings that nobody chose."""
    path = Path(os.environ["PREREAD_CONFIG"])
    try:
        path.open("rb").close()
    except OSError as error:
        raise Invalid(
            f"The settings file {path} (PREREAD_CONFIG) cannot be read: {error.strerror}.", code="settings"
        ) from None
    try:
        return (TomlConfigSettingsSource(settings_cls, path),)
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise Invalid(f"The settings file {path} is not TOML: {error}.", code="settings") from None
