"""What the trainer can be told, and the specification that its process is started with."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from infra.config import CONTENT, Config
from infra.drafts.start_draft import StartConfig

LossName = Literal["kl_div", "reverse_kl_div", "js_div", "ce", "tv", "nla", "lk_hybrid"]


class TrainConfig(Config):
    """Hyper-parameters of the draft and of its training; the last group changes only how the work is done."""

    algorithm: Annotated[Literal["eagle3"], CONTENT] = "eagle3"
    """What is trained: the kind of draft, by speculators' name (`infra.training.algorithm`)."""

    init_from: StartConfig | None = None
    """A draft whose weights training starts from; unset: fresh weights. Its revision, not its place, enters the
    key."""

    epochs: Annotated[float, CONTENT, Field(gt=0)] = 10.0
    """Passes over the training samples; ignored when `num_steps` is given."""

    num_steps: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Optimizer steps in all; unset: as many as `epochs` makes."""

    learning_rate: Annotated[float, CONTENT, Field(gt=0)] = 1e-3
    """Highest learning rate of the schedule."""

    schedule: Annotated[Literal["cosine", "linear", "constant"], CONTENT] = "cosine"
    """How the learning rate falls after the warm-up."""

    warmup_steps: Annotated[int, CONTENT, Field(ge=0)] = 50
    """Steps over which the learning rate rises from zero."""

    final_learning_rate_ratio: Annotated[float, CONTENT, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step, as a share of `learning_rate`."""

    optimizer: Annotated[Literal["adamw", "muon"], CONTENT] = "adamw"
    """AdamW for all weights, or Muon for the matrices and AdamW for the rest."""

    weight_decay: Annotated[float, CONTENT, Field(ge=0)] = 0.01
    """Decoupled weight decay, for matrices only."""

    adam_betas: Annotated[tuple[float, float], CONTENT] = (0.9, 0.95)
    """AdamW's averaging factors of the gradient and of its square."""

    max_gradient_norm: Annotated[float, CONTENT, Field(gt=0)] = 1.0
    """Gradients with a larger norm over all parameters are scaled down to it."""

    total_seq_len: Annotated[int, CONTENT, Field(ge=16)] = 2048
    """Tokens of one packed sequence; a longer sample is cut."""

    global_batch: Annotated[int, CONTENT, Field(ge=1)] = 1
    """Packed sequences per optimizer step, over all ranks; a multiple of num_ranks x num_nodes."""

    ttt_steps: Annotated[int, CONTENT, Field(ge=1, le=16)] = 3
    """Training-time-test steps: how far ahead the draft is trained to guess."""

    ttt_step_loss_decay: Annotated[float, CONTENT, Field(gt=0, le=1)] = 0.8
    """Weight of each TTT step's loss relative to the step before."""

    loss: Annotated[LossName, CONTENT] = "kl_div"
    """Loss between the draft's and the verifier's distributions, by speculators' name."""

    num_layers: Annotated[int, CONTENT, Field(ge=1)] = 1
    """Decoder layers of the draft."""

    train_lm_head: Annotated[bool, CONTENT] = False
    """Train the draft's language-model head too; else it stays the verifier's rows."""

    norm_before_residual: Annotated[bool, CONTENT] = True
    """Take the residual after the hidden states' norm (speculators' default for training)."""

    fc_norm: Annotated[bool, CONTENT] = False
    """Normalize each auxiliary layer's states by itself before they are combined."""

    norm_output: Annotated[bool, CONTENT] = False
    """Feed normalized hidden states back from one TTT step to the next."""

    state_noise: Annotated[float, CONTENT, Field(ge=0)] = 0.0
    """Uniform noise on the auxiliary hidden states, as a share of their root mean square; against overfitting."""

    seed: Annotated[int, CONTENT, Field(ge=0)] = 0
    """Seeds the initial weights, the order of the samples, the split and the noise."""

    precision: Annotated[Literal["bf16", "fp32"], CONTENT] = "bf16"
    """Arithmetic of the matrix products; weights, gradients and the optimizer are always fp32."""

    validation_share: Annotated[float, CONTENT, Field(ge=0, lt=1)] = 0.02
    """Share of the samples, by hash of their id, that only measures."""

    export_checkpoint: Annotated[Literal["last", "best"], CONTENT] = "last"
    """Step whose weights are exported: the last, or the one with the highest predicted acceptance length on the
    validation samples."""

    early_stop_patience: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Training ends after so many validations in a row without a gain in predicted acceptance length; unset: never.
    The learning rate falls as if it did not."""

    early_stop_min_gain: Annotated[float, CONTENT, Field(ge=0)] = 0.0
    """What counts as a gain: more than so much above the length at the last gain."""

    shuffle_window_shards: Annotated[int, CONTENT, Field(ge=1)] = 16
    """Shards whose samples are mixed with one another; that many are open at a time, and twice as many are checked
    (from S3: fetched) before their samples are needed."""

    input_workers: Annotated[int | None, Field(ge=0)] = None
    """Processes that read and decode samples for one rank; 0: a thread of the trainer does. Unset: 0 on CPU, on
    GPUs the rank's cores but two, at most 12. Each takes memory for one packed sequence, the rank for 3 more."""

    shard_cache_gib: Annotated[float, Field(gt=0)] = 200.0
    """Disk space for copies of an S3 root's shards, in this machine's cache folder; those used longest ago go. They
    leave a fifth of what the disk has free beside them."""

    num_ranks: Annotated[int, Field(ge=1)] = 1
    """Processes that torchrun starts on one node, one per GPU."""

    distribution: Literal["ddp", "fsdp2"] = "ddp"
    """Every rank holds the whole draft (DistributedDataParallel), or a shard of it and of the optimizer (FSDP2)."""

    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes that train together. The first runs the pipeline and says what to start on each of the others."""

    rendezvous_endpoint: str = ""
    """`host:port` of the first node, where the others find it. Needed with several nodes."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often torchrun starts the ranks again by itself when one dies; each start resumes from the newest
    checkpoint. The pipeline retries besides, from anywhere."""

    num_threads: Annotated[int | None, Field(ge=1)] = None
    """CPU threads of one rank; unset: the machine's cores shared among the ranks, and one where a GPU trains."""

    checkpoint_every_steps: Annotated[int, Field(ge=1)] = 200
    """Steps between checkpoints: what a crash may cost."""

    log_every_steps: Annotated[int, Field(ge=1)] = 10
    """Steps between lines of metrics."""

    validate_every_steps: Annotated[int, Field(ge=1)] = 200
    """Steps between measurements on the validation samples; one is made at the end in any case. Enters the key only
    where validations decide (`export_checkpoint: best`, `early_stop_patience`)."""

    wandb_project: Annotated[str | None, Field(min_length=1)] = None
    """Project on Weights & Biases that the metrics also go to; WANDB_API_KEY comes from the environment. Needs the
    package wandb, which is not among the pins."""

    mlflow_tracking_uri: Annotated[str | None, Field(min_length=1)] = None
    """MLflow server (or `sqlite:///` and `file:` on this machine) that the metrics also go to; its credentials come
    from the environment. Needs the package mlflow, which is not among the pins."""

    mlflow_experiment: Annotated[str, Field(min_length=1)] = "draftsmith"
    """Experiment there; made where it is not."""

    hang_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """A trainer that reports nothing for so long counts as hung: it is ended and resumed from its checkpoint."""

    implementation: Literal["auto", "rows", "packed", "library"] = "auto"
    """Forward pass: `rows` goes sample by sample and `packed` over whole packs, both computing trained rows only;
    `library` is speculators' own. auto: rows on CPU; packed on GPUs, or library where it cannot be compiled."""

    activation_checkpointing: bool = False
    """Make activations again in the backward pass instead of keeping them: less memory, a longer step."""

    smoke_serve: bool = True
    """Before the export is committed, let vLLM serve it once: it must load, and answer ten greedy requests as the
    verifier alone would. Takes one start of vLLM."""

    smoke_serve_tie_nats: Annotated[float, Field(gt=0)] = 0.5
    """How much less likely than the verifier's first choice a token of those answers may be: two choices that
    nearly tie are rounded one way or the other in bf16. Verifiers of few bits may need more."""

    @field_validator("mlflow_tracking_uri")
    @classmethod
    def _holds_no_secret(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).username is not None:
            raise ValueError(
                "must hold no user and password; give them in the environment, as MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD"
            )
        return uri

    @property
    def validations_decide(self) -> bool:
        """Whether what is exported depends on the validations, and so on when they are made."""
        return self.export_checkpoint == "best" or self.early_stop_patience is not None

    def content(self) -> dict[str, Any]:
        found = super().content()
        return found | {"validate_every_steps": self.validate_every_steps} if self.validations_decide else found

    @model_validator(mode="after")
    def _has_what_decides(self) -> Self:
        if self.validations_decide and self.validation_share == 0:
            raise ValueError(
                "train.validation_share must be above 0 for export_checkpoint `best` and for early_stop_patience: "
                "validation samples decide both"
            )
        return self


class DraftSpec(Config):
    """What decides the draft's shape."""

    train: TrainConfig
    """Hyper-parameters."""

    verifier_path: str
    """Local folder with the verifier's config and safetensors weights."""

    aux_hidden_state_layer_ids: Annotated[tuple[int, ...], Field(min_length=1)]
    """Layers whose states the draft reads: the extracted ids without the last."""

    trust_remote_code: bool = False
    """Run code that the verifier's folder brings along to read its config."""


class TrainSpec(DraftSpec):
    """Everything one run of the trainer reads: the content of the file torchrun is started with."""

    hidden_states_uri: str
    """Folder of the hidden_states stage (`<root>/hidden_states/<key>`)."""

    vocab_uri: str
    """The vocabulary map (`<root>/vocab/<key>/vocab.safetensors`)."""

    draft_uri: str
    """Folder of the drafts stage (`<root>/drafts/<key>`); checkpoints go below it."""

    lease_epoch: Annotated[int, Field(ge=0)]
    """Number of the lease under which this run writes; a later holder has a higher one."""

    lease_uri: str = ""
    """The lease itself; before each checkpoint the run looks whether it is still under this one. Empty: never."""

    inputs_sha256: str = ""
    """Hash of all that is trained on (`infra.manifest.inputs_sha256`); checkpoints of other inputs do not count."""

    metrics_path: str
    """Local file that gets one JSON line per logged step."""
