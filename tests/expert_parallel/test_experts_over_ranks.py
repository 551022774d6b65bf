"""Experts over ranks: see `experts_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "experts_program.py"
OVERLAP = "experts_overlap_program.py"
STATE = "experts_state_program.py"
CAPACITY = "experts_capacity_program.py"


def test_two_ranks(tmp_path) -> None:
    run(
        2,
        tmp_path / "store",
        "blocks=plain",
        "transports",
        "messages",
        "uneven",
        "averages",
        "reused",
        program=PROGRAM,
    )


def test_capacities_and_what_runs_while_tokens_travel(tmp_path) -> None:
    run(2, tmp_path / "store", "capacity", "overlapped", "asynchronous", program=OVERLAP)


def test_a_capacity_over_ranks_of_tensor_parallelism(tmp_path) -> None:
    run(2, tmp_path / "store", "unread", "overflow=one,dp", program=CAPACITY)


def test_what_stops_one_rank_stops_those_that_would_wait(tmp_path) -> None:
    run(4, tmp_path / "store", "replicas", "lanes", program=CAPACITY)


@pytest.mark.slow
def test_a_capacity_with_formats_in_graphs(tmp_path) -> None:
    run(2, tmp_path / "store", "folded=one", program=CAPACITY)


@pytest.mark.slow
def test_a_capacity_on_four_ranks(tmp_path) -> None:
    names = ("folded=dp", "overflow=one,dp,all,tp")
    run(4, tmp_path / "store", *names, program=CAPACITY)


@pytest.mark.slow
def test_one_graph_with_a_capacity(tmp_path) -> None:
    run(2, tmp_path / "store", "graphs", program=OVERLAP)
    run(4, tmp_path / "four", "capacity", "overlapped", "asynchronous", program=OVERLAP)


def test_faults_and_training(tmp_path) -> None:
    run(2, tmp_path / "store", "faults", program=PROGRAM)
    run(2, tmp_path / "state", "training", "planned", program=STATE)


def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(tmp_path) -> None:
    run(2, tmp_path / "two", f"save={tmp_path}", program=STATE)
    run(1, tmp_path / "one", f"resume={tmp_path}", program=STATE)
    run(4, tmp_path / "four", f"resume={tmp_path}", program=STATE)


@pytest.mark.more
def test_replicas_of_experts(tmp_path) -> None:
    run(4, tmp_path / "store", "replicas", "planned", program=STATE)


@pytest.mark.slow
def test_layouts_and_four_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "blocks=two,biased,scaled,input", program=PROGRAM)
    run(
        4,
        tmp_path / "four",
        "blocks=plain,biased",
        "transports",
        "uneven",
        "averages",
        "reused",
        program=PROGRAM,
    )


HF = "experts_hf_program.py"


#: Of all the families that are tried, those of the default tests; the others are more.
FAMILIES = "Mixtral,Qwen3-Next,DeepSeek-V3,Gemma 4 MoE,GPT-OSS,Nemotron-H,Llama 4"
OTHERS = "Qwen2-MoE,Qwen3-MoE,DeepSeek-V2,GLM-4.5,OLMoE,MiniMax,Ernie 4.5 MoE,Jamba"


def test_models_of_transformers(tmp_path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    names = (f"families={FAMILIES}", "recipe", f"saved={tmp_path / 'folder'}")
    run(2, tmp_path / "store", *names, program=HF)


@pytest.mark.more
def test_other_models_of_transformers(tmp_path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    run(2, tmp_path / "store", f"families={OTHERS}", program=HF)


@pytest.mark.slow
def test_more_models_of_transformers(tmp_path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    run(2, tmp_path / "store", "families=Phi-MoE,Granite-MoE,dots1,JetMoE", program=HF)
    run(4, tmp_path / "four", f"families={FAMILIES},{OTHERS}", program=HF)


@pytest.mark.more
def test_the_trainer_of_transformers(tmp_path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("accelerate")
    names = (f"trains={tmp_path}", f"resumes={tmp_path / 'folder'}")
    run(2, tmp_path / "store", *names, program="experts_trainer_program.py")
