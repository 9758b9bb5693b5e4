"""README.md's tables: every name of torch's test groups is there, and what it is mapped to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.differential.cases import CASES

HERE = Path(__file__).resolve().parent
# The names of torch's flex_attention and flex_decoding tests, group by group, without `test_`.
GROUPS = {
    "Score mods": (
        "builtin_score_mods different_seqlen different_block_size seqlen_lt_default seqlen_lt_custom dynamic "
        "automatic_dynamic max_autotune kv_batch_broadcast kv_batch_broadcast_causal GQA GQA_causal_mask "
        "strided_inputs function_composition skip_odd_keys silu dependent_causal_bidirectional natten_2d "
        "padded_dense_causal njt_causal seq_masking captured_buffers captured_buffers_all_dims captured_scale "
        "load_from_bias_seq_only load_from_bias_seq_batch load_from_bias_head_seq_batch load_from_view_buffer "
        "load_rel_bias index_multiple index_weird1 index_weird2 reduction_unrolled captured_reduction "
        "non_equal_head_dims non_pow_2_headdim"
    ),
    "Masks": (
        "doc_mask_sparse document_masking_edge_case causal_block causal_block_paged "
        "causal_block_non_divisible multiple_mask_calls mask_mod_combiners custom_block_mask_generator "
        "make_block_mask new_empty_mask_mod fully_masked_out_rows fully_masked_out_rows_0_check "
        "fully_masked_out_rows_gqa block_mask_non_divisible modular_indexing "
        "compacted_block_mask_matches_reference large_batch_heads_grid_dimension mask_mod_functools_partial "
        "callable_class_mask_mod small_q_kv_len"
    ),
    "Auxiliary outputs": (
        "return_max return_aux return_aux_deprecation_warnings logsumexp_correctness lse_masked_output "
        "force_write_lse differentiable_logsumexp"
    ),
    "Kernel options and backends": ("kernel_options_argument backend_selection TMA warp_spec"),
    "Errors": (
        "mixed_device invalid_block_size zero_length_sequence small_embedding same_device cpu_lse "
        "wrong_length mixed_dtypes"
    ),
    "Layouts": ("stride_ordering non_contiguous_last_dim strided_backwards inputs_are_realized output_strides"),
    "Compilation": (
        "recompile_counts dynamic_shape_guards free_symbol symbol_closure epilogue_fused "
        "fw_bw_graph_correctness aot_eager_gradcheck subclass_dispatch always_freezes_layout "
        "custom_score_mod_layout_freeze logging_file logsumexp_only_return"
    ),
    "Checkpointing, autocast, precision, determinism": ("selective_ac autocast float32_matmul_precision determinism"),
    "Block masks": (
        "block_mask_attributes block_size_changes getitem sliced_mod_error device_change from_kv_blocks "
        "init_mismatched create_is_cuda_graphable compiling_create_block_mask viz doc_mask_clamped "
        "eager_tracing sparsity mask_vs_sequence_lengths none_q_indices poison broadcasted_head_block_mask "
        "pytree upcast"
    ),
    "Paged attention": (
        "page_allocation allocate convert_logical_block_mask convert_mask_mod update paged_builtin_score_mods"
    ),
    "Learnable biases": (
        "relative_1d_bias absolute_2d_bias head_specific_bias batch_head_bias multiplicative_bias "
        "local_window_bias global_tokens_bias weird_bias indirect_bias symmetric_bias flipped_indexed_bias "
        "head_specific_gate distinct_biases bias_global_compiled only_grad backprop_error_case bias_vs_sdpa "
        "head_bias_req_grad comparison_vs_sdpa"
    ),
    "Decoding": (
        "bw_decoding_fails decoding_builtin_score_mods paged_attention_page_size tma_decoding "
        "non_divisible_offset_mask non_divisible_offset_mask_with_captured_buffer "
        "non_divisible_multi_token_offset_mask non_divisible_multi_token_offset_mask_with_captured_buffer "
        "head_dependent_mask_mod subgraph_respect_decomposition recompile_changed_score_mod "
        "multiple_score_mod_calls mixed_dtypes_sqnr large_kv_int64 windowed_no_mask_vs_sdpa "
        "windowed_full_mask_vs_sdpa windowed_partial_block_vs_sdpa not_pw_of_two "
        "non_sparse_multiple_block_size dynamic_shape_counter multi_block_m larger_block_mask_bug "
        "decode_at_different_input_position"
    ),
}
NAMES = {name: group for group, names in GROUPS.items() for name in names.split()}


def tables() -> dict[str, tuple[str, str]]:
    """Name -> (heading above it, what it is mapped to)."""
    found: dict[str, tuple[str, str]] = {}
    heading = ""
    for line in (HERE / "README.md").read_text().splitlines():
        heading = line[3:] if line.startswith("## ") else heading
        row = re.fullmatch(r"\| ([^|]+) \| ([^|]+) \|", line)
        if row and row[1] != "torch":
            assert row[1] not in found, f"{row[1]} is there twice"
            found[row[1]] = (heading, row[2])
    return found


def test_every_name_of_torch_is_in_its_table() -> None:
    assert {name: heading for name, (heading, _) in tables().items()} == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_is_mapped_to_exists(name: str) -> None:
    _, mapped = tables()[name]
    if mapped.startswith("none: "):
        assert len(mapped) > len("none: ")
        return
    ours = re.findall(r"`([^`]+)`", mapped)
    assert ours, f"{name} is mapped to nothing"
    for one in ours:
        path, separator, test = one.partition("::")
        if separator:
            assert re.search(rf"^def {test}\(", (HERE / path).read_text(), re.MULTILINE), one
        else:
            assert one in CASES, one


def test_every_row_stands_beside_the_names_it_claims() -> None:
    found = tables()
    for case in CASES.values():
        assert case.torch_names, case.name
        for name in case.torch_names:
            assert f"`{case.name}`" in found[name][1], f"{case.name} claims {name}"
