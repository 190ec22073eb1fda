"""Facts that a checkpoint does not state: where they come from, and what is refused instead of guessed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import (
    A2D,
    DREAM,
    FAST,
    ILLADA,
    QWEN_CONFIG,
    QWEN_SPECIALS,
    QWEN_TEMPLATE,
    QWEN_TEXT,
    SDAR,
    TOKENS,
    llada,
    loaded,
    logits,
    qwen,
    said,
    with_tokenizer,
    write,
)
from unmask.config import DEMO, read_config
from unmask.core.options import LoraOptions
from unmask.models import load_checkpoint, load_model, save, trial
from unmask.models.adapter_config import CONFIG, WEIGHTS, pattern_values
from unmask.models.config_file import ConfigFile
from unmask.models.families import SUPPORTED
from unmask.models.load import outline
from unmask.models.lora import add_adapter, save_adapter
from unmask.models.recognition import block_length, family_of, mask_token
from unmask.models.tiny import CharacterTokenizer
from unmask.studies.cost.estimate import estimate
from wording import mentions, naming


def save_adapter_of(folder: Path, out: Path, **settings: int) -> None:
    policy = load_model(folder, **settings)
    add_adapter(policy, LoraOptions(rank=2), seed=0)
    save_adapter(policy, out, str(folder))


# --- the block length of SDAR -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "name", "given", "block", "source"),
    [
        (8, "SDAR-4B-Chat", None, 8, "block_size in config.json"),
        (16, "SDAR-4B-Chat-b16", None, 16, "block_size in config.json"),
        ("absent", "SDAR-4B-Chat-b16", None, 16, "SDAR-4B-Chat-b16"),
        (None, "SDAR-4B-Chat-b64", None, 64, "SDAR-4B-Chat-b64"),
        ("absent", "SDAR-4B-Chat", 8, 8, "by you"),
        (4, "SDAR-4B-Chat-b16", 32, 32, "by you"),
    ],
)
def test_sdars_block_length_is_the_users_the_files_or_the_names(tmp_path, stated, name, given, block, source):
    folder, _, config = qwen(tmp_path / name, SDAR, block_size=stated)
    file = ConfigFile(folder / "config.json", config)
    found = block_length(family_of(file), file, name, given)
    assert found.value == block and source in found.source
    policy = load_checkpoint(folder, tokenizer=CharacterTokenizer(), causal_block=given)
    assert policy.causal_block == block == outline(folder, given).causal_block
    save(policy, tmp_path / "copy")  # without its name, and without the user
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["block_size"] == block
    assert torch.equal(logits(loaded(tmp_path / "copy"), TOKENS), logits(policy, TOKENS))


def test_without_a_source_the_block_length_is_asked_for(tmp_path):
    folder, _, _ = qwen(tmp_path / "SDAR-4B-Chat", SDAR, block_size="absent")
    assert mentions(said(folder), "FOLDER/config.json", "block length", "causal_block=N", '"block_size": N')
    with pytest.raises(ValueError, match=naming("causal_block=N")):
        outline(folder)
    with pytest.raises(ValueError, match=naming("causal_block", 0)):
        outline(folder, 0)
    folder, _, _ = qwen(tmp_path / "SDAR-4B-Chat-b0", SDAR, block_size="absent")
    assert mentions(said(folder), "SDAR-4B-Chat-b0", 0)


@pytest.mark.parametrize(
    ("kind", "name", "stated", "named"),
    [
        (SDAR, "SDAR-4B-Chat-b16", {}, ("block_size", 4, "SDAR-4B-Chat-b16", 16, "causal_block=N")),
        (SDAR, "sdar", {"causal_block": 8}, ("causal_block", 8, "block_size", 4)),
        (SDAR, "sdar", {"block_size": "absent", "causal_block": None}, ("block length", "causal_block=N")),
        (SDAR, "sdar", {"block_size": 65}, ("blocks of 65", "block_size", 64)),
        (FAST, "fast", {"bd_size": "absent", "block_size": 16}, ("block_size", 16, "bd_size")),
        (ILLADA, "illada", {"block_size": 16}, ("block_size", 16, "no blocks")),
        (A2D, "a2d-bd3lm", {"block_size": None}, ("block length", "causal_block=N")),
    ],
)
def test_block_lengths_that_contradict_each_other_or_the_family_are_refused(tmp_path, kind, name, stated, named):
    folder, _, _ = qwen(tmp_path / name, kind, **stated)
    assert mentions(said(folder), "FOLDER/config.json", *named)


@pytest.mark.parametrize("stated", [{"bd_size": None}, {"bd_size": "absent", "causal_block": None}])
def test_an_empty_field_does_not_make_a_block_causal_family_bidirectional(tmp_path, stated):
    assert loaded(qwen(tmp_path, FAST, **stated)[0]).causal_block == 32


def test_the_users_block_length_replaces_all_that_a_config_has(tmp_path):
    folder, _, _ = qwen(tmp_path / "SDAR-b16", SDAR, causal_block=8)
    save(loaded(folder, causal_block=16), tmp_path / "copy")
    assert loaded(tmp_path / "copy").causal_block == 16


def test_the_block_length_travels_with_an_adapter(tmp_path):
    folder, _, _ = qwen(tmp_path / "SDAR", SDAR, block_size="absent", **QWEN_TEXT)
    save_adapter_of(with_tokenizer(folder, QWEN_SPECIALS), tmp_path / "adapter", causal_block=8)
    assert load_model(tmp_path / "adapter").causal_block == outline(tmp_path / "adapter").causal_block == 8


def test_the_block_length_is_a_key_of_every_command(unmask, monkeypatch, tmp_path):
    folder, _, _ = qwen(tmp_path / "SDAR", SDAR, block_size="absent", **QWEN_TEXT)
    with_tokenizer(folder, QWEN_SPECIALS)
    tiny = ["--task", "arithmetic", "rollout.length=16", "rollout.steps=2"]
    train = ["updates=1", "prompts=1", "group=2", "save_every=0", "eval.every=0", "eval.prompts=1"]
    for command, rest in {
        "sample": [str(folder), "1+1="],
        "eval": [str(folder), "--problems", "1", "--samples", "1"],
        "train": [f"model={folder}", "--out", str(tmp_path / "run"), *train],
    }.items():
        code, _, err = unmask(command, *rest, *tiny)
        assert code and mentions(err, "causal_block=N"), (command, err)
        code, _, err = unmask(command, *rest, *tiny, "causal_block=8")
        assert code == 0, err
    assert load_model(tmp_path / "run" / "checkpoint").causal_block == 8
    code, _, err = unmask("merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged"))
    assert code == 0 and json.loads((tmp_path / "merged" / "config.json").read_text())["block_size"] == 8, err


def test_full_attention_can_be_replaced_by_blocks_but_not_in_every_network(tmp_path):
    folder, _, _ = qwen(tmp_path / "a2d", A2D)
    assert outline(folder).causal_block is None and outline(folder, 4).causal_block == 4
    with pytest.raises(ValueError, match=naming("causal_block", "tiny")):
        load_model("tiny", causal_block=4)
    with pytest.raises(ValueError, match=naming("causal_block", "LLaDA", "rollout.block")):
        outline("GSAI-ML/LLaDA-8B-Base", 32)


# --- mask ids -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "mask"), [(ILLADA, 5), (FAST, 151665), (SDAR, 151669), (DREAM, 151666)])
def test_a_mask_id_that_no_config_states_is_the_familys(kind, mask):
    config = {name: value for name, value in {**QWEN_CONFIG, **kind}.items() if name != "mask_token_id"}
    file = ConfigFile(Path("config.json"), config)
    found = mask_token(family_of(file), file, None)
    assert found.value == mask and mentions(found.source, family_of(file).name, "mask_token_id")


def test_the_tokenizer_does_not_change_the_familys_mask_id(tmp_path):
    folder, _, _ = qwen(tmp_path, ILLADA, head=False, **{**QWEN_TEXT, "mask_token_id": "absent", "pad_token_id": 1})
    with_tokenizer(folder, QWEN_SPECIALS, mask_token="<|mask|>", unk_token="<|endoftext|>")
    assert load_model(folder).mask_id == 5


@pytest.mark.parametrize("mask", ["<|mask|>", "<|endoftext|>"])
def test_the_unknown_token_is_never_the_mask(tmp_path, mask):
    folder, _, _ = qwen(tmp_path, A2D, **{**QWEN_TEXT, "mask_token_id": "absent"})
    with_tokenizer(folder, QWEN_SPECIALS[:4], mask_token=mask, unk_token="<|endoftext|>")
    if mask == "<|mask|>":  # added by the tokenizer as a new token
        assert load_model(folder).mask_id == 260
    else:
        assert mentions(said(folder, load_model), "FOLDER", "mask token", "mask_token_id")


@pytest.mark.parametrize("changes", [{"eos_token_id": 126}, {"eos_token_id": [2, 126]}, {"pad_token_id": 126}])
def test_a_mask_that_is_also_an_end_or_padding_is_refused(tmp_path, changes):
    folder, _, _ = qwen(tmp_path, DREAM, **changes)
    assert mentions(
        said(folder), "FOLDER/config.json", 126, "mask token", "padding" if "pad_token_id" in changes else "end"
    )


def test_a_mask_that_ends_a_turn_is_refused(tmp_path):
    folder, _, _ = qwen(tmp_path, SDAR, **{**QWEN_TEXT, "mask_token_id": 258})
    with_tokenizer(folder, QWEN_SPECIALS)  # 258 is <|im_end|>
    assert mentions(said(folder, load_model), 258, "ends a turn", "mask_token_id")


# --- relatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "name", "reason"),
    [
        ({"architectures": ["DreamForCausalLM"], "model_type": "Dream", "block_size": 32}, "DreamReasoner", "Qwen3"),
        ({"model_type": "Dream", "block_size": 32}, "DreamReasoner", "Qwen3"),
        ({"architectures": ["DreamModel"], "block_size": 32}, "DreamReasoner", "Qwen3"),
        ({"architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama"}, "Stable-DiffCoder", "llama"),
        ({"architectures": ["NemotronLabsDiffusionModel"]}, "Nemotron-Labs-Diffusion", "llama_4_scaling_beta"),
    ],
)
def test_relatives_with_a_borrowed_name_are_refused_by_their_own(tmp_path, stated, name, reason):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_CONFIG, **stated}))
    assert mentions(said(tmp_path), "FOLDER/config.json", name, reason, SUPPORTED)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        (ILLADA, {"layer_norm_eps": 1e-5}, ("layer_norm_eps", 1e-5)),
        (ILLADA, {"rope_theta": "absent"}, ("rope_theta",)),
        (SDAR, {"num_key_value_heads": 3}, ("4 heads", "3 key heads")),
        (SDAR, {"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types", "sliding_attention")),
        (SDAR, {"architectures": ["Qwen3ForCausalLM"], "is_causal": False}, ("Qwen3ForCausalLM", "model_type", "sdar")),
        (ILLADA, {"resid_pdrop": 0.1}, ("resid_pdrop", 0.1)),
        (ILLADA, {"rope_scaling": {"type": "default", "factor": 2.0}}, ("factor", 2.0)),
        (FAST, {"attention_bias": False}, ("attention_bias", False)),
        (FAST, {"mlp_bias": True}, ("mlp_bias", True)),
        (SDAR, {"num_experts": 128}, ("num_experts", 128)),
        (SDAR, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta": 0.1}}, ("beta", 0.1)),
        (SDAR, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", 0.5)),
        (SDAR, {"rope_parameters": {"rope_theta": 5e5}}, ("rope_theta", 5e5, 1e6)),
        (SDAR, {"rope_scaling": {"rope_type": "longrope"}}, ("rope_type", "longrope")),
        (
            SDAR,
            {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 1.0}},
            ("rope_scaling", "rope_parameters"),
        ),
    ],
)
def test_values_that_the_network_does_not_honour_are_refused_by_name(tmp_path, kind, changes, named):
    folder, _, _ = qwen(tmp_path, kind, **changes)
    assert mentions(said(folder), "FOLDER/config.json", *named)


# --- unmask doctor MODEL ------------------------------------------------------------------------------------


def facts(unmask, model: object) -> dict[str, tuple[str, str]]:
    code, out, err = unmask("doctor", str(model), "--json")
    assert code == 0, err
    return {fact["what"]: (fact["value"], fact["source"]) for fact in json.loads(out)}


def test_doctor_prints_every_fact_with_its_source(unmask, tmp_path):
    folder, _, _ = qwen(tmp_path / "SDAR-b8", SDAR, block_size="absent", **QWEN_TEXT)
    found = facts(unmask, with_tokenizer(folder, QWEN_SPECIALS))
    assert found["family"] == ("SDAR", "architectures in config.json: SDARForCausalLM")
    assert found["mask token"] == ("260", "mask_token_id in config.json")
    assert found["end, padding"] == ("256, 256", "config.json")
    assert found["attention"] == ("block-causal, blocks of 8", "the name SDAR-b8")
    assert found["rotary"][0] == "theta 1e+06, default, in the dtype of the activations"
    assert found["head"] == ("its own matrix", "tie_word_embeddings in config.json")
    save_adapter_of(folder, tmp_path / "adapter")
    assert facts(unmask, tmp_path / "adapter")["adapter"][0] == f"rank 2 on {folder}"
    code, out, _ = unmask("doctor", str(tmp_path / "adapter"))
    assert code == 0 and "block-causal, blocks of 8  (causal_block, stated by you or an adapter)" in out
    weights = tmp_path / "adapter" / WEIGHTS
    save_file(load_file(weights), weights)  # an adapter of peft does not state it
    assert facts(unmask, tmp_path / "adapter")["attention"] == ("block-causal, blocks of 8", "the name SDAR-b8")


def test_doctor_refuses_tensors_that_a_load_refuses_and_says_what_config_json_does_not_have(unmask, tmp_path):
    folder, weights, config = qwen(tmp_path, DREAM, tie_word_embeddings="absent", max_position_embeddings=2048)
    found = facts(unmask, folder)
    assert found["head"] == ("its own matrix", "config.json has no tie_word_embeddings")
    assert found["length"] == ("2048 tokens", "config.json")
    write(folder, config, {name: weight for name, weight in weights.items() if name != "lm_head.weight"})
    code, out, err = unmask("doctor", str(folder))
    assert code == 2 and not out and mentions(err, "lm_head.weight")


@pytest.mark.parametrize("head", [True, False])
def test_doctor_says_why_illada_has_its_mask_and_its_head(unmask, tmp_path, head):
    folder, _, _ = qwen(tmp_path, ILLADA, head=head)
    found = facts(unmask, folder)
    assert found["mask token"] == ("5", "the iLLaDA family; config.json has no mask_token_id")
    assert found["attention"] == ("full", "the iLLaDA family") and ("stored" in found["head"][0]) == head


def test_doctor_knows_released_models_without_a_connection_and_names_what_it_refuses(unmask, tmp_path):
    found = facts(unmask, "Efficient-Large-Model/Fast_dLLM_v2_1.5B")
    assert (
        found["config.json"][0] == "not read; built-in sizes"
        and "rotary" not in found
        and "1,543,714,304" in found["network"][0]
    )
    assert found["shift"][0] == "token i is predicted at i - 1" and found["mask token"][0] == "151665"
    assert facts(unmask, "tiny")["family"][0] == "the embedded model"
    small = qwen(tmp_path / "small", SDAR, **{**QWEN_TEXT, "vocab_size": 261})[0]
    code, out, err = unmask("doctor", str(with_tokenizer(small, [*QWEN_SPECIALS, "<a>", "<b>"])))
    assert code == 2 and not out and mentions(err, "tokenizer", 263, 261)
    folder, _, _ = qwen(tmp_path / "SDAR", SDAR, block_size="absent")
    code, out, err = unmask("doctor", str(folder))
    assert code == 2 and not out and mentions(err, "causal_block=N")


# --- damage, and programs that do not end -------------------------------------------------------------------


def test_a_load_looks_at_a_canvas_with_mask(tmp_path):
    folder, weights, config = qwen(tmp_path, SDAR)
    weights["model.embed_tokens.weight"][126] = torch.nan
    write(folder, config, weights)
    assert mentions(said(folder), "FOLDER", "logits", "finite")


def test_weights_of_several_dtypes_need_a_stated_one(tmp_path):
    folder, weights, config = qwen(tmp_path, SDAR, torch_dtype="absent")
    write(folder, config, {**weights, "model.norm.weight": weights["model.norm.weight"].bfloat16()})
    assert mentions(said(folder), "FOLDER", "bfloat16, float32", "config.json", "dtype")
    assert loaded(folder, dtype=torch.float32).lm.model.norm.weight.dtype == torch.float32


def test_a_tensor_in_two_shards_must_have_one_value(tmp_path):
    folder, weights, _ = llada(tmp_path, shards=2)
    name, path = "model.transformer.ln_f.weight", folder / "model-00001-of-00002.safetensors"
    stored = {key: weights[key] for number, key in enumerate(weights) if number % 2 == 0}
    save_file({**stored, name: weights[name]}, path)
    assert loaded(folder).mask_id == 125
    save_file({**stored, name: weights[name] + 1}, path)
    assert mentions(said(folder), name, path.name, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10000000000 }}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{% generation %}{{ 'a' * 200000 }}{% endgeneration %}",
        "{{ messages[0].content * messages[0].content | length }}",
        "{{ messages[0].content * (messages[0].content | length ** 6) }}",
        "{% for a in messages %}{% if loop.index > 8 %}{{ 'a' * 200000 }}{% endif %}{% endfor %}",
        "{{ 'a' * (strftime_now('%Y') | int) * 100 }}",
        "{{ messages | tojson(indent=1000000) }}",
        "{% if messages[0].role == 'system' %}{{ 'a' * 200000 }}{% endif %}",
        "{% if messages | length > 1 %}{{ 1 + 'a' }}{% endif %}{{ messages[0].content * 200 }}",
    ],
)
def test_a_chat_template_that_makes_a_huge_text_is_refused(tmp_path, template):
    folder, _, _ = qwen(tmp_path, SDAR, **QWEN_TEXT)
    with_tokenizer(folder, QWEN_SPECIALS, chat_template=template)
    assert mentions(said(folder, load_model), "chat template", "chat_template")


def test_a_chat_template_may_refuse_a_conversation_of_several_turns():
    trial.check_template("{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}a", {})


def test_a_chat_template_that_writes_the_mask_is_refused(tmp_path):
    folder, _, _ = qwen(tmp_path, SDAR, **{**QWEN_TEXT, "mask_token_id": 257})
    with_tokenizer(folder, QWEN_SPECIALS, chat_template=QWEN_TEMPLATE)  # 257 is <|im_start|>
    assert mentions(said(folder, load_model), "FOLDER", 257, "mask token", "mask_token_id")


def test_a_chat_template_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 0.1)
    twice = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=naming("chat template", "0.1 s")):
        trial.check_template(twice, {})


@pytest.mark.parametrize("key", ["target_modules", "rank_pattern"])
def test_an_adapter_pattern_that_backtracks_for_ever_is_refused(tmp_path, monkeypatch, key):
    monkeypatch.setattr(trial, "SECONDS", 0.1)
    folder, _, _ = qwen(tmp_path / "base", SDAR, **QWEN_TEXT)
    save_adapter_of(with_tokenizer(folder, QWEN_SPECIALS), tmp_path / "adapter")
    path = tmp_path / "adapter" / CONFIG
    pattern = "([a-z._0-9]+)+!"
    changed = {**json.loads(path.read_text()), key: {pattern: 2} if key == "rank_pattern" else pattern}
    path.write_text(json.dumps(changed))
    assert mentions(said(tmp_path / "adapter", load_model), f"FOLDER/{CONFIG}", repr(pattern))
    if key == "target_modules":
        with pytest.raises(ValueError, match=naming(CONFIG, pattern)):  # and in a dry run
            estimate(read_config(DEMO, [f"model={tmp_path / 'adapter'}", "method=diffu_grpo"]))


def test_a_pattern_that_backtracks_without_a_repeat_is_refused(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 0.1)
    with pytest.raises(ValueError, match=naming("q_proj", "0.1 s")):
        trial.check_patterns(["q_proj", "(|)" * 40 + "q_proj"], ["model.layers.0.mlp.up_proj"])


def test_patterns_that_take_long_to_read_are_refused_at_once():
    with pytest.raises(ValueError, match=naming(500_000, 100_000)):
        trial.check_patterns(["(a|b)" * 100_000], ["model.layers.0.mlp.up_proj"])
    with pytest.raises(ValueError, match="regular expression") as refused:
        trial.check_patterns(["(" * 50_000], ["model.layers.0.mlp.up_proj"])
    assert len(str(refused.value)) < 500


def test_an_adapter_with_values_that_are_not_finite_is_refused(tmp_path):
    folder, _, _ = qwen(tmp_path / "base", SDAR, **QWEN_TEXT)
    save_adapter_of(with_tokenizer(folder, QWEN_SPECIALS), tmp_path / "adapter")
    weights, key = tmp_path / "adapter" / WEIGHTS, "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file({**load_file(weights), key: torch.full((2, 48), torch.nan)}, weights)
    (tmp_path / "adapter/SHA256SUMS").unlink()
    assert mentions(said(tmp_path / "adapter", load_model), f"FOLDER/{WEIGHTS}", key, "finite")


def test_ranks_and_alphas_are_found_as_peft_finds_them():
    from peft.utils.other import get_pattern_key

    patterns = {
        "experts.1.up": 1,
        "up": 2,
        r"mlp\..*": 3,
        "layers.0.mlp.experts.10.up": 4,
        "down|q": 5,
        "^layers.1.o": 6,
    }
    names = [f"layers.{i}.mlp.experts.{j}.{kind}" for i in (0, 1) for j in (0, 1, 10) for kind in ("up", "down")]
    names += ["layers.1.o", "a.layers.1.o", "q", "layers.0.q", "xup", "layers.0.k"]
    for chosen in (patterns, dict(reversed(patterns.items()))):
        value = pattern_values(chosen, 0)
        assert [value(name) for name in names] == [chosen.get(get_pattern_key(chosen, name), 0) for name in names]
    many = {f"layers.{i}.experts.{j}.up": i for i in range(20) for j in range(256)}  # minutes, one by one
    value = pattern_values(many, -1)
    assert [value(name) for name in many] == list(many.values())


def test_patterns_in_use_are_accepted():
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(40)]
    usual = [
        r".*\.(q_proj|k_proj)",
        r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)",
        r"model\.layers\.\d+\.mlp\.up_proj",
    ]
    trial.check_patterns(usual, names)
    with pytest.raises(ValueError, match=naming("regular expression", "(")):
        trial.check_patterns(["(q_proj"], names)
