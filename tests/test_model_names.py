"""What the name of a model says, what its config.json says, and what is known of it without a file."""

import json
import sys
from pathlib import Path

import pytest
from mixtures import mixture_folder
from test_recognition import facts

from checkpoints import DREAM, FAST, QWEN_SPECIALS, QWEN_TEXT, SDAR, loaded, qwen, said, with_tokenizer
from unmask.core.policy import ShiftedPolicy
from unmask.models import load_model
from unmask.models.load import located_config, outline
from unmask.models.recognition import model_name
from wording import mentions, naming

SNAPSHOT = "models--JetLM--SDAR-4B-Chat-b16/snapshots/0123abcd"


def unstated(folder: Path) -> Path:
    """An SDAR whose config.json has no block length."""
    folder.mkdir(parents=True, exist_ok=True)
    return qwen(folder, SDAR, block_size="absent")[0]


# --- the block length in a name -----------------------------------------------------------------------------


def test_the_name_of_a_folder_is_that_of_the_folder_it_leads_to(tmp_path, monkeypatch):
    monkeypatch.chdir(unstated(tmp_path / "SDAR-b8"))
    for path in (".", "../SDAR-b8", "../SDAR-b8/."):
        assert loaded(Path(path)).causal_block == outline(path).causal_block == 8
    assert located_config(".")[1] == "SDAR-b8"


def test_the_folder_that_hf_download_prints_has_the_name_of_its_repository(tmp_path, unmask):
    folder = unstated(tmp_path / SNAPSHOT)
    assert model_name(folder) == "JetLM/SDAR-4B-Chat-b16"
    assert loaded(folder).causal_block == outline(folder).causal_block == 16
    assert facts(unmask, folder)["attention"] == ("block-causal, blocks of 16", "the name JetLM/SDAR-4B-Chat-b16")


@pytest.mark.parametrize("name", ["exp-b64", "lr1e-5-b64", "models--sdar--exp-b64/snapshots/0123"])
def test_an_ending_of_another_name_is_no_block_length(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    assert loaded(qwen(folder, SDAR, block_size=4)[0]).causal_block == 4
    assert mentions(said(unstated(folder)), "block length", "causal_block=N")


@pytest.mark.parametrize("name", ["my-sdar-b64", "TraDo-4B-b64"])
def test_the_ending_of_a_release_counts_and_must_not_contradict_config_json(tmp_path, name):
    assert loaded(unstated(tmp_path / name)).causal_block == 64
    folder, _, _ = qwen(tmp_path / name, SDAR, block_size=4)
    assert mentions(said(folder), "block_size", 4, 64, "causal_block=N", "rename")


# --- the block length on every command ----------------------------------------------------------------------


def test_doctor_and_merge_take_the_block_length_that_they_ask_for(tmp_path, unmask):
    folder = with_tokenizer(qwen(tmp_path / "plain", SDAR, block_size="absent", **QWEN_TEXT)[0], QWEN_SPECIALS)
    for command in (("doctor", str(folder)), ("merge", str(folder), "--out", "merged")):
        code, _, err = unmask(*command)
        assert code == 2 and mentions(err, "causal_block=N")
        code, out, err = unmask(*command, "causal_block=8")
        assert code == 0, err
        for wrong, named in (("causal_block=0", 0), ("causal_block=x", "x"), ("dtype=float32", "dtype=float32")):
            code, _, err = unmask(*command, wrong)
            assert code == 2 and mentions(err, "causal_block", named)
        code, _, err = unmask(*command, "--causal-block", "8")
        assert code == 2 and mentions(err, "causal_block=8")
        if command[0] == "doctor":
            assert "blocks of 8" in out
    assert json.loads(Path("merged/config.json").read_text())["block_size"] == 8


# --- facts of a model that is known by its name -------------------------------------------------------------


def test_nothing_is_said_to_come_from_a_config_json_that_was_not_read(unmask):
    for name in ("JetLM/SDAR-4B-Chat", "inclusionAI/LLaDA2.0-mini", "GSAI-ML/LLaDA-8B-Base"):
        found = facts(unmask, name)
        assert found.pop("config.json")[0] == "not read; built-in sizes"
        assert found["family"][1] == f"the name {name}"
        assert not [source for _, source in found.values() if "config.json" in source]


def test_without_a_connection_a_hub_name_is_looked_for_once_and_in_the_cache(monkeypatch):
    asked = []

    def unreachable(*_, **settings):
        asked.append(settings["timeout"])
        raise OSError("Name or service not known")

    def download(name: str, file: str, local_files_only: bool) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        asked.append(local_files_only)
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ValueError, match=naming("nosuch/nosuch-8B", "hub cannot be reached")):
        outline("nosuch/nosuch-8B")
    assert asked == [5.0, True]


# --- what config.json alone shows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": "absent"}, ("causal_block=N",)),
        ({"mask_token_id": "126"}, ("mask_token_id", "'126'", "whole number")),
        ({"eos_token_id": [2, "3"]}, ("eos_token_id", "'3'", "whole number")),
        ({"pad_token_id": True}, ("pad_token_id", True, "whole number")),
        ({"use_sliding_window": True}, ("use_sliding_window",)),
        ({"is_causal": True}, ("is_causal", True)),
    ],
)
def test_it_is_checked_before_transformers_is_imported(tmp_path, monkeypatch, changes, named):
    monkeypatch.setitem(sys.modules, "transformers", None)  # to import it is an error
    folder, _, _ = qwen(tmp_path, SDAR, **changes)
    assert mentions(said(folder), "FOLDER/config.json", *named)
    with pytest.raises(ValueError, match=naming("config.json", *named)):
        outline(folder)


FOREIGN = {
    "llama_4_scaling_beta": 0.1,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "attention_multiplier": 0.0156,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
}


@pytest.mark.parametrize("field", FOREIGN)
def test_fields_of_other_networks_are_refused_by_name_in_every_family(tmp_path, field):
    value = FOREIGN[field]
    folders = [qwen(tmp_path / "dream", DREAM, **{field: value})[0]]
    for number, family in enumerate(("LLaDA-MoE", "LLaDA2", "SDAR-MoE")):
        folder = mixture_folder(tmp_path / str(number), family)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, field: value}))
        folders.append(folder)
    for folder in folders:
        assert mentions(said(folder), "FOLDER/config.json", field, value)


@pytest.mark.parametrize("neutral", [{"logit_scale": 1.0, "residual_multiplier": 1}, {"final_logit_softcapping": None}])
def test_values_of_theirs_that_change_nothing_are_accepted(tmp_path, neutral):
    assert loaded(qwen(tmp_path, DREAM, **neutral)[0]).mask_id == 126


# --- LLaDA2.1 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_llada2_that_edits_is_refused_with_what_to_do(tmp_path, unmask, file):
    folder = mixture_folder(tmp_path / "LLaDA2.1", "LLaDA2")
    config = json.loads((folder / "config.json").read_text()) if file == "config.json" else {"eos_token_id": 2}
    (folder / file).write_text(json.dumps({**config, "editing_threshold": 0.5}))
    assert mentions(said(folder), f"FOLDER/{file}", "editing_threshold", 0.5, "editing off", "null")
    code, out, err = unmask("doctor", str(folder))
    assert code == 2 and not out and mentions(err, file, "editing_threshold")
    for fine in ({**config, "editing_threshold": None}, config):
        (folder / file).write_text(json.dumps(fine))
        assert loaded(folder).causal_block == 32
    assert facts(unmask, folder)["editing"][0].startswith("off")


def test_the_grammar_of_a_refused_block_length_fits_every_family():
    for name, family in (("GSAI-ML/iLLaDA-8B-Base", "iLLaDA"), ("GSAI-ML/LLaDA-8B-Base", "LLaDA")):
        with pytest.raises(ValueError, match=f"is of the {family} family"):
            outline(name, 32)


@pytest.mark.parametrize(("kind", "shift"), [(FAST, True), (DREAM, True), (SDAR, False)])
def test_a_policy_says_whether_something_predicts_its_first_token(tmp_path, kind, shift):
    policy = loaded(qwen(tmp_path, kind)[0])
    assert isinstance(policy, ShiftedPolicy) and policy.shift == shift


def test_a_model_in_the_cache_of_the_hub_is_loaded_from_its_folder(tmp_path):
    folder = qwen(unstated(tmp_path / SNAPSHOT), SDAR, block_size="absent", **QWEN_TEXT)[0]
    assert load_model(with_tokenizer(folder, QWEN_SPECIALS)).causal_block == 16
