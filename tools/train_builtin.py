"""Trains the built-in model on stories of our own grammar and writes its Hugging Face folder; no part of the engine.

Needs torch besides the run-time packages (numpy, tokenizers, safetensors). The default arguments are the recipe of the
shipped weights; the model card that is written beside them holds the same command and the measured figures.

Data layout: a row of ``--context`` tokens starts at a story start and holds whole stories, each ``BOS text EOS``, the
last one cut. Attention reaches back to the BOS of the token's own story; positions count through the row, so that the
model sees every position up to the context length.

Name drills: a model this small needs very many tokens to find out that a name in a story is one that was there before.
Short texts that name two characters over and over teach it that within a few hundred steps; they are part of the data
for a while once the words are known, and end long before the training does, so that the model writes stories only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from story_grammar import PLOTS, name_drill, story

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
HELD_OUT_SEED = 1_000_000_000  # training stories have the seeds 0, 1, 2, ...; held-out ones start here
TOKENIZER_STORIES = 20_000
WORD_PATTERN = r"\n+| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+"
GENERATION_DEFAULTS = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
DRILL_START, MIX_START, MIX_END = 600, 740, 900  # steps whose batches hold name drills, see ``drill_rows``
SAMPLES_MEASURED = 100
PROMPTS = (
    "Once upon a time",
    "One day",
    "There was",
    "In a small village",
    "Lily and Tom",
    "The little fox was",
    "It was a rainy day.",
    "A dragon named Zorp",
    "Long ago",
    "Anna wanted to",
)

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, stories]
---

# stories-1m

A Llama-shaped language model of {parameters:,} parameters that writes short children's stories in simple English. It is
small enough to ship with an inference engine, and it is for trying the engine out: streaming, batching, sampling, stop
conditions. It knows nothing of the world and follows no instructions.

| | |
|---|---|
| architecture | `LlamaForCausalLM`, tied embeddings, bf16 |
| sizes | {num_hidden_layers} layers, hidden {hidden_size}, {num_attention_heads} heads, {num_key_value_heads} KV \
heads of {head_dim}, intermediate {intermediate_size}, rope theta {rope_theta:.0f} |
| context | {max_position_embeddings} tokens |
| tokenizer | byte-level BPE, {vocab_size} tokens, any UTF-8 text round-trips; BOS goes before a text, EOS ends \
a story |
| sampling defaults | temperature {temperature}, top-p {top_p} |
| licence | Apache-2.0 |

## Data

Only text of our own: `tools/story_grammar.py` writes a story from a seed ({plots} plots; characters, places, things,
wishes, obstacles, dialogue and endings are drawn and put into sentence templates). Training stories have the seeds
0, 1, 2, ...; held-out stories start at {held_out_seed}. The tokenizer is trained on the first
{tokenizer_stories:,} training stories.

## Recipe

    {command}

AdamW (0.9, 0.98), weight decay 0.1 on matrices, gradients clipped at norm 1, learning rate {lr} after {warmup} steps of
warm-up, constant to step {drill_start}, then linear to 0. {steps:,} steps of {batch} rows of {max_position_embeddings}
tokens = {training_tokens:,} tokens; {training_stories:,} different stories, each read once. A row begins with a story
and holds stories one after the other (BOS text EOS, the last one cut); attention stays within a story, positions count
through the row. Steps {drill_start} to {mix_start} read name drills (`name_drill` in the same grammar: short sentences
that keep naming two characters), steps {mix_start} to {mix_end} drills and stories in equal parts, all others stories.
Products in {products}, weights in fp32, seed {seed}, torch {torch_version}, {minutes:.0f} minutes on one shared CPU
core. Another processor or torch version rounds differently, so it gives other weights of the same quality.

## Figures

| | |
|---|---|
| held-out loss, fp32 weights | {loss_fp32:.4f} nats per token |
| held-out loss, bf16 weights as shipped | {loss_bf16:.4f} nats per token (perplexity {perplexity:.2f}) |
| for comparison: token frequencies alone | {unigram:.4f} nats per token |
| for comparison: uniform over the vocabulary | {uniform:.4f} nats per token |
| held-out stories | {held_out:,}, together {held_out_tokens:,} tokens, each alone after BOS |
| held-out stories that also occur in training | {seen_percent:.1f} % |
| sampled stories that end with EOS in the context | {ended_percent:.0f} % of {samples_measured} |
| sampled stories that are a training story word for word | {copied_percent:.0f} % of {samples_measured} |

The held-out stories come from the same grammar, so the loss says how well the model learned the grammar, not English.

## Intended use and limits

For demonstrations, tests and benchmarks of inference code. A prompt that opens a story in simple words is continued
well;
any other prompt, a rare name or a word the grammar lacks is continued with something that has little to do with it. Now
and then a detail changes within a story (a thing, a gender, who did what). Greedy decoding prefers a few plots. Text is
English only, and nothing but made-up stories.

## Samples

Real outputs of the shipped weights, unedited; each begins with its prompt.

### Greedy

{greedy}

### Sampled (temperature {temperature}, top-p {top_p})

{sampled}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, by their Hugging Face names."""

    vocab_size: int = 2048
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 352
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


# -------------------------------------------------------------------------------------------------------------- model


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (half-rotation layout)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = (y.repeat_interleave(groups, dim=1) for y in (k, heads(self.v_proj(x))))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021); pairs are (i, i + head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """A Llama decoder with tied embeddings; parameter names are Hugging Face's without the ``model.`` prefix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        stds = {"q_proj": 0.09, "k_proj": 0.09, "o_proj": self._residual_std(), "down_proj": self._residual_std()}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=stds.get(name.split(".")[-2], 0.05))

    def _residual_std(self) -> float:
        return 0.02 / math.sqrt(2 * self.shape.num_hidden_layers)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits [rows, length, vocab_size] of ids [rows, length]; ``mask`` None is causal over the whole row."""
        length = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length], mask)
        return F.linear(self.norm(x), self.embed_tokens.weight)


# --------------------------------------------------------------------------------------------------------------- data


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any UTF-8 text round-trips, a BOS is put before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((story(seed) for seed in range(TOKENIZER_STORIES)), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, wanted {vocab_size}")
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    return tokenizer


def encode_story(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text).ids, tokenizer.token_to_id(EOS)]


def pack_rows(encoded_stories: Iterator[list[int]], row_length: int) -> Iterator[list[int]]:
    """Rows of ``row_length`` ids, each filled from a story start; what is cut off a row's last story is not used."""
    while True:
        row: list[int] = []
        while len(row) < row_length:
            row += next(encoded_stories)
        yield row[:row_length]


# ----------------------------------------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, constant until the drills begin, then linear to 0."""
    decay_start = min(DRILL_START, steps // 2)
    if step < decay_start:
        return peak * min(1.0, (step + 1) / warmup)
    return peak * (steps - step) / (steps - decay_start)


def drill_rows(step: int, batch: int) -> int:
    """How many rows of a step's batch hold name drills in place of stories: all of them, then half, then none."""
    if DRILL_START <= step < MIX_START:
        return batch
    return batch // 2 if MIX_START <= step < MIX_END else 0


def story_rows_before(step: int, batch: int) -> int:
    return sum(batch - drill_rows(earlier, batch) for earlier in range(step))


def story_mask(ids: Tensor, bos_id: int) -> Tensor:
    """Where a query [row, 1, query, key] may look: back to the BOS of its own story."""
    story_of = (ids == bos_id).cumsum(dim=1)
    same_story = story_of[:, None, :, None] == story_of[:, None, None, :]
    return same_story & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


def new_optimizer(model: Model) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-9, foreach=True)


def train(model: Model, tokenizer: Tokenizer, arguments: argparse.Namespace) -> float:
    """Train in place, from the checkpoint where there is one; returns the wall time in seconds."""
    optimizer, first_step, time_before = new_optimizer(model), 0, 0.0
    if arguments.checkpoint and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step, time_before = state["step"], state["time_s"]
        if first_step >= arguments.steps:
            return time_before

    bos_id = tokenizer.token_to_id(BOS)

    def batch_loss(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            logits = model(batch[:, :-1], story_mask(batch[:, :-1], bos_id))
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    compute_loss = torch.compile(batch_loss) if arguments.compile else batch_loss
    stories = pack_rows((encode_story(tokenizer, story(seed)) for seed in itertools.count()), arguments.context + 1)
    drills = pack_rows((encode_story(tokenizer, name_drill(seed)) for seed in itertools.count()), arguments.context + 1)
    story_rows = story_rows_before(first_step, arguments.batch)
    drill_rows_before = first_step * arguments.batch - story_rows
    stories, drills = itertools.islice(stories, story_rows, None), itertools.islice(drills, drill_rows_before, None)
    started, losses = time.monotonic(), []
    for step in range(first_step, arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps, arguments.lr, arguments.warmup)
        drilled = drill_rows(step, arguments.batch)
        rows = [*itertools.islice(drills, drilled), *itertools.islice(stories, arguments.batch - drilled)]
        loss = compute_loss(torch.tensor(rows))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        elapsed = time_before + time.monotonic() - started
        done = step + 1
        if done % arguments.log_every == 0:
            recent = sum(losses[-arguments.log_every :]) / len(losses[-arguments.log_every :])
            print(f"step {done}/{arguments.steps} loss {recent:.4f} {elapsed:.0f} s", flush=True)
        if arguments.checkpoint and (done % arguments.checkpoint_every == 0 or done == arguments.steps):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done, "time_s": elapsed}
            torch.save(state, arguments.checkpoint)
    return time_before + time.monotonic() - started


@torch.no_grad()
def held_out_loss(model: Model, stories: list[list[int]]) -> float:
    """Mean cross-entropy in nats per token of stories each alone after BOS, the EOS counted."""
    total, count = 0.0, 0
    for ids in stories:
        row = torch.tensor([ids[: model.shape.max_position_embeddings + 1]])
        total += F.cross_entropy(model(row[:, :-1])[0], row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    return total / count


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The stories that a run read: their texts, and how often each token id occurs in them."""

    texts: frozenset[str]
    token_counts: Counter[int]


def training_data(tokenizer: Tokenizer, rows: int, row_length: int) -> TrainingData:
    texts: set[str] = set()
    counts: Counter[int] = Counter()

    def watched() -> Iterator[list[int]]:
        for seed in itertools.count():
            text = story(seed)
            ids = encode_story(tokenizer, text)
            texts.add(text)
            counts.update(ids[1:])
            yield ids

    for _ in itertools.islice(pack_rows(watched(), row_length), rows):
        pass
    return TrainingData(frozenset(texts), counts)


def unigram_loss(counts: Counter[int], stories: list[list[int]], vocab_size: int) -> float:
    """Nats per token of the held-out stories under add-one smoothed token frequencies of training stories."""
    total = sum(counts.values()) + vocab_size
    targets = [token for ids in stories for token in ids[1:]]
    return -sum(math.log((counts[token] + 1) / total) for token in targets) / len(targets)


@torch.no_grad()
def generate(model: Model, tokenizer: Tokenizer, prompt: str, seed: int | None) -> tuple[str, bool]:
    """A story that begins with the prompt, greedy without a seed; and whether it ended with EOS."""
    ids = tokenizer.encode(prompt).ids
    generator = torch.Generator().manual_seed(seed or 0)
    while len(ids) < model.shape.max_position_embeddings:
        logits = model(torch.tensor([ids]))[0, -1]
        if seed is None:
            token = int(logits.argmax())
        else:
            p, order = torch.softmax(logits / GENERATION_DEFAULTS["temperature"], 0).sort(descending=True, stable=True)
            p[p.cumsum(0) - p > GENERATION_DEFAULTS["top_p"]] = 0
            token = int(order[torch.multinomial(p, 1, generator=generator)])
        if token == tokenizer.token_to_id(EOS):
            return tokenizer.decode(ids), True
        ids.append(token)
    return tokenizer.decode(ids), False


# ------------------------------------------------------------------------------------------------------------- output


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(folder: Path, model: Model, tokenizer: Tokenizer) -> None:
    """Write weights (bf16), configuration and tokenizer as a Hugging Face ``LlamaForCausalLM`` folder."""
    folder.mkdir(parents=True, exist_ok=True)
    bos_id, eos_id = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"bos_token_id": bos_id, "eos_token_id": eos_id, **GENERATION_DEFAULTS}
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.shape.max_position_embeddings,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tensors = {f"model.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


@torch.no_grad()
def rounded_to_bf16(model: Model) -> Model:
    """A copy whose weights are those of the written folder, held in fp32."""
    rounded = Model(model.shape)
    rounded.load_state_dict({name: p.to(torch.bfloat16).float() for name, p in model.state_dict().items()})
    return rounded


def measure(model: Model, tokenizer: Tokenizer, arguments: argparse.Namespace) -> dict[str, float]:
    """The figures of the card; losses in nats per token, texts from the weights as they are shipped."""
    data = training_data(tokenizer, story_rows_before(arguments.steps, arguments.batch), arguments.context + 1)
    texts = [story(HELD_OUT_SEED + i) for i in range(arguments.held_out)]
    stories = [encode_story(tokenizer, text) for text in texts]
    shipped = rounded_to_bf16(model)
    written = [generate(shipped, tokenizer, pick_prompt(i), seed=i) for i in range(SAMPLES_MEASURED)]
    return {
        "training_stories": len(data.texts),
        "training_tokens": arguments.steps * arguments.batch * arguments.context,
        "held_out_tokens": sum(len(ids) - 1 for ids in stories),
        "loss_fp32": held_out_loss(model, stories),
        "loss_bf16": held_out_loss(shipped, stories),
        "unigram": unigram_loss(data.token_counts, stories, model.shape.vocab_size),
        "seen_percent": 100 * sum(text in data.texts for text in texts) / len(texts),
        "ended_percent": 100 * sum(ended for _, ended in written) / len(written),
        "copied_percent": 100 * sum(text in data.texts for text, _ in written) / len(written),
    }


def pick_prompt(index: int) -> str:
    return PROMPTS[index % len(PROMPTS)]


def quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def write_card(folder: Path, model: Model, tokenizer: Tokenizer, arguments: argparse.Namespace, time_s: float) -> None:
    """Measure the model and write ``README.md``, the model card."""
    figures = measure(model, tokenizer, arguments)
    shipped = rounded_to_bf16(model)
    greedy = [generate(shipped, tokenizer, prompt, seed=None)[0] for prompt in PROMPTS[:4]]
    sampled = [generate(shipped, tokenizer, pick_prompt(i), seed=i)[0] for i in range(6)]
    names = ("steps", "batch", "context", "lr", "warmup", "seed", "threads")
    command = " ".join(
        ["python tools/train_builtin.py", *(f"--{name} {getattr(arguments, name)}" for name in names)]
        + [f"--{name}" for name in ("bf16", "compile") if getattr(arguments, name)]
    )
    text = CARD.format(
        **asdict(model.shape),
        **figures,
        **GENERATION_DEFAULTS,
        parameters=sum(p.numel() for p in model.parameters()),
        plots=len(PLOTS),
        command=command,
        steps=arguments.steps,
        batch=arguments.batch,
        lr=arguments.lr,
        warmup=arguments.warmup,
        seed=arguments.seed,
        minutes=time_s / 60,
        held_out=arguments.held_out,
        held_out_seed=HELD_OUT_SEED,
        tokenizer_stories=TOKENIZER_STORIES,
        drill_start=DRILL_START,
        mix_start=MIX_START,
        mix_end=MIX_END,
        uniform=math.log(model.shape.vocab_size),
        perplexity=math.exp(figures["loss_bf16"]),
        samples_measured=SAMPLES_MEASURED,
        products="bfloat16" if arguments.bf16 else "fp32",
        torch_version=torch.__version__.split("+")[0],
        greedy="\n\n".join(quoted(t) for t in greedy).replace("\n\n>", "\n\n&nbsp;\n\n>"),
        sampled="\n\n".join(quoted(t) for t in sampled).replace("\n\n>", "\n\n&nbsp;\n\n>"),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(json.dumps(figures, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path(__file__).resolve().parents[1] / "weights/stories-1m", help="folder to write")
    add("--seed", type=int, default=1, help="seed of the initial weights")
    add("--steps", type=int, default=2200, help="optimizer steps")
    add("--batch", type=int, default=4, help="rows per step")
    add("--context", type=int, default=512, help="tokens per row, and the model's longest context")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--warmup", type=int, default=100, help="steps of linear warm-up")
    add("--threads", type=int, default=1, help="torch threads (another number rounds differently)")
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="products in bfloat16, weights in fp32")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile (a C++ compiler)")
    add("--log-every", type=int, default=50, help="steps between lines of the log")
    add("--checkpoint", type=Path, help="file to save the training state in, and to continue from")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add("--held-out", type=int, default=1000, help="stories that measure the held-out loss")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = train_tokenizer(Shape().vocab_size)
    model = Model(Shape(max_position_embeddings=arguments.context))
    time_s = train(model, tokenizer, arguments)
    write_folder(arguments.out, model, tokenizer)
    write_card(arguments.out, model, tokenizer, arguments, time_s)


if __name__ == "__main__":
    main()
