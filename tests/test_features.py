"""What the documentation promises, and the tests that hold it.

A feature without a test is a promise without a keeper: whoever adds one to the README or to `pt_docs` adds it here, and
whoever renames or removes a test sees here what it stood for. The names are looked up in the source of the tests.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FEATURES: dict[str, dict[str, list[str]]] = {
    "rerankers": {
        "transform keeps rows, order, index, columns and input; scores are float64, ranks follow them": [
            "rerankers/test_rerankers.py::test_rows_columns_index_and_dtypes",
            "rerankers/test_rerankers.py::test_input_is_unchanged",
            "rerankers/test_rerankers.py::test_ranks_follow_scores_from_zero",
            "rerankers/test_rerankers.py::test_empty_and_full_frames_give_the_same_columns",
        ],
        "scores do not depend on batch, other rows or their order": [
            "rerankers/test_rerankers.py::test_batch_size_does_not_matter",
            "rerankers/test_rerankers.py::test_row_order_does_not_matter",
            "modelling/test_scorer.py::test_a_score_does_not_depend_on_the_batch",
        ],
        "PyTerrier's own contract tests, operators, plans of pt.Experiment, grid search": [
            "rerankers/test_rerankers.py::test_pyterrier_test_case",
            "rerankers/test_pipelines.py::test_compose_and_cutoff",
            "rerankers/test_pipelines.py::test_sum_feature_union_and_set_operators",
            "rerankers/test_pipelines.py::test_experiment_plans_agree",
            "rerankers/test_pipelines.py::test_grid_search",
        ],
        "weights load at the first transform; construction and inspection load nothing": [
            "rerankers/test_rerankers.py::test_construction_touches_neither_weights_nor_random_state",
            "rerankers/test_rerankers.py::test_inspection_loads_nothing",
        ],
        "a changed attribute takes effect at the next transform, trained weights stay or the change is refused": [
            "rerankers/test_pipelines.py::test_changed_argument_takes_effect",
            "rerankers/test_pipelines.py::test_changed_argument_keeps_trained_weights",
            "rerankers/test_pipelines.py::test_trained_model_may_not",
        ],
        "apply_attributes: a copy with other arguments and the trained weights": [
            "rerankers/test_pipelines.py::test_apply_attributes_keeps_weights",
        ],
        "pickling before and after loading": ["rerankers/test_rerankers.py::test_pickle_before_and_after_loading"],
        "import pyterrier_longdoc imports neither torch nor transformers": [
            "rerankers/test_pipelines.py::test_import_is_light",
        ],
        "FirstP: the checkpoint's own scores": [
            "modelling/test_backbones.py::test_firstp_scores_as_the_cross_encoder_does",
        ],
        "MaxP, SumP: best and sum of the windows' scores": [
            "modelling/test_backbones.py::test_maxp_is_the_cross_encoder_on_the_best_window",
            "modelling/test_heads.py::test_formulas",
        ],
        "KMaxP(k, weights)": [
            "modelling/test_heads.py::test_best_k",
            "modelling/test_heads.py::test_weights_of_the_best_scores",
        ],
        "Birch(first_stage_weight): sentences, mixed with the first stage's score": [
            "rerankers/test_rerankers.py::test_birch_mixes_in_the_first_stage",
            "rerankers/test_pipelines.py::test_grid_search",
        ],
        "AvgP: mean over disjoint chunks": ["modelling/test_heads.py::test_formulas"],
        "PARADE avg, max, attn": [
            "modelling/test_heads.py::test_formulas",
            "modelling/test_heads.py::test_attention_starts_as_the_average",
            "modelling/test_heads.py::test_attention_follows_its_vector",
        ],
        "PARADE(attention='elementwise')": ["modelling/test_heads.py::test_formulas"],
        "PARADE transformer: layers, attention_heads, separators, positions": [
            "modelling/test_heads.py::test_transformer_reads_at_its_first_vector_and_sees_every_window",
            "modelling/test_heads.py::test_transformer_without_separators_and_positions",
            "modelling/test_heads.py::test_transformer_attention_heads",
        ],
        "PARADE(aggregator=checkpoint), special_vectors": [
            "modelling/test_heads.py::test_formula_of_a_pre_trained_aggregator",
            "modelling/test_heads.py::test_aggregator_starts_with_the_weights_of_its_checkpoint",
            "modelling/test_heads.py::test_special_vectors_of_a_checkpoint",
        ],
        "PARADE(query_states, separate_query_projection)": [
            "modelling/test_heads.py::test_formula_with_query_states",
            "modelling/test_heads.py::test_query_states_matter_only_where_they_are_real",
        ],
        "arguments without effect are refused": [
            "rerankers/test_rerankers.py::test_wrong_arguments",
            "modelling/test_heads.py::test_no_option_is_without_effect",
        ],
        "numbers of parameters are those of the papers": [
            "rerankers/test_parameters.py::test_parts",
            "rerankers/test_parameters.py::test_pre_trained_aggregators",
            "rerankers/test_parameters.py::test_late_interaction",
        ],
        "CEDR knrm, pacrr, drmm": [
            "modelling/test_cedr.py::test_formulas",
            "modelling/test_cedr.py::test_matches_of_a_long_document_are_those_of_its_chunks",
            "modelling/test_cedr.py::test_knrm_starts_as_the_plain_ranker",
        ],
        "NeuralModel1(smoothing, background, self_translation, projection, units)": [
            "modelling/test_cedr.py::test_translation_probabilities",
            "modelling/test_cedr.py::test_self_translation",
            "modelling/test_cedr.py::test_probabilities_must_be_between_zero_and_one",
        ],
        "LateIR(interaction, aggregator, cached_bytes): windows are encoded once for all queries": [
            "modelling/test_late_interaction.py::test_formula",
            "modelling/test_late_interaction.py::test_windows_are_encoded_once_for_all_queries",
            "modelling/test_late_interaction.py::test_a_small_memory_gives_the_same_scores",
        ],
        "MORESPlus over BART; says that it is experimental": [
            "modelling/test_mores.py::test_formula",
            "modelling/test_mores.py::test_windows_are_encoded_once_for_all_queries",
            "modelling/test_mores.py::test_it_says_that_it_is_experimental",
        ],
        "BiEncoder first, max, avg: as sentence-transformers and as Hugging Face compute it": [
            "rerankers/test_biencoder.py::test_equals_sentence_transformers",
            "rerankers/test_biencoder.py::test_equals_hugging_face",
            "rerankers/test_biencoder.py::test_aggregations",
        ],
        "BiEncoder: pooling, dense layer, similarity and prompts are the checkpoint's own": [
            "modelling/test_embedding_settings.py::test_pooling_is_the_checkpoints_own",
            "modelling/test_embedding_settings.py::test_dense_layer_is_applied",
            "modelling/test_embedding_settings.py::test_similarity_is_the_checkpoints_own",
            "modelling/test_embedding_settings.py::test_prompts_are_the_checkpoints_own",
        ],
        "BiEncoder(query_prefix, passage_prefix)": ["rerankers/test_biencoder.py::test_prefixes"],
        "BiEncoder(position_step=8) for E5-4K": [
            "rerankers/test_biencoder.py::test_positions_follow_each_input_s_own_length",
        ],
        "BiEncoder(windows, max_windows, selection, max_doc_len, max_query_len)": [
            "rerankers/test_biencoder.py::test_given_windows_replace_sizes",
            "rerankers/test_biencoder.py::test_max_doc_len",
            "rerankers/test_biencoder.py::test_long_queries_are_cut",
        ],
        "BiEncoder: windows and queries are embedded once and remembered; memory is bounded": [
            "rerankers/test_biencoder.py::test_everything_is_encoded_once",
            "rerankers/test_biencoder.py::test_the_cache_is_bounded",
        ],
        "UntrainedWarning, once": ["rerankers/test_rerankers.py::test_untrained_models_warn_once"],
    },
    "backbones": {
        "cross-encoders of BERT, ELECTRA, RoBERTa, XLM-R, CamemBERT, DeBERTa, DistilBERT, ModernBERT": [
            "modelling/test_backbones.py::test_firstp_scores_as_the_cross_encoder_does",
            "modelling/test_backbones.py::test_parts_of_cross_encoders",
        ],
        "checkpoints of two labels score their difference, of more are refused": [
            "modelling/test_backbones.py::test_two_labels_score_their_difference",
            "modelling/test_backbones.py::test_too_many_labels",
            "modelling/test_families.py::test_classifier_of_three_classes_is_no_ranker",
        ],
        "plain language models get a fresh final layer": [
            "modelling/test_backbones.py::test_plain_encoders_have_no_pooler_and_a_new_final_layer",
        ],
        "LongP(max_doc_len): one input, its FirstP twin differs in one argument": [
            "rerankers/test_longp.py::test_the_firstp_twin_is_one_argument",
            "rerankers/test_longp.py::test_texts_longer_than_the_backbone_takes_are_cut",
        ],
        "LongP: Longformer with global attention": [
            "rerankers/test_longp.py::test_longformer_global_attention",
            "rerankers/test_longp.py::test_longformer_with_cls_alone_is_the_published_classifier",
        ],
        "LongP: BigBird, block-sparse or full": [
            "rerankers/test_longp.py::test_bigbird_is_the_published_classifier_fresh_for_every_input",
            "rerankers/test_longp.py::test_bigbird_comes_back_to_block_sparse_attention",
            "rerankers/test_longp.py::test_bigbird_whose_positions_are_no_whole_number_of_blocks",
        ],
        "LongP: ModernBERT, NomicBERT, EuroBERT, Llama, Qwen3": [
            "rerankers/test_longp.py::test_scores_depend_on_nothing_but_query_and_text",
            "rerankers/test_longp.py::test_cross_encoders_are_the_published_classifiers",
            "rerankers/test_longp.py::test_a_decoder_with_a_head_is_the_published_classifier",
        ],
        "LongP: JINA-v2 and MosaicBERT without remote code": [
            "modelling/test_alibi.py::test_states_by_hand",
            "modelling/test_alibi.py::test_every_published_weight_of_the_encoder_is_used",
            "modelling/test_alibi.py::test_loading_runs_no_code_of_the_checkpoint",
        ],
        "LongP(answers=('yes', 'no')), template": [
            "rerankers/test_longp.py::test_a_model_that_answers_scores_as_its_model_card_says",
            "rerankers/test_longp.py::test_template_gives_the_tokens_of_its_filled_in_text",
            "rerankers/test_longp.py::test_templates_that_lack_something",
        ],
        "LongP(pooling)": ["rerankers/test_longp.py::test_pooling_takes_the_real_tokens"],
        "LongP(attn_implementation); models saved with flash attention load anywhere": [
            "rerankers/test_longp.py::test_attention_that_an_architecture_lacks",
            "rerankers/test_longp.py::test_a_model_of_another_machine_s_attention",
        ],
        "tokenizers with a step written in Python work, and their tokens are not remembered": [
            "modelling/test_token_cache.py::test_a_model_with_a_tokenizer_in_python",
        ],
        "half-precision checkpoints are computed in float32": [
            "modelling/test_backbones.py::test_half_precision_checkpoints_are_computed_in_fp32",
        ],
        "checkpoints without safetensors weights are refused": [
            "modelling/test_backbones.py::test_no_weights",
            "modelling/test_alibi.py::test_a_checkpoint_without_safetensors",
        ],
        "models with remote code can be used, not saved": [
            "modelling/test_checkpoint.py::test_remote_code_is_not_saved"
        ],
        "pad_query: the papers' layout; else the tokenizer's own": [
            "modelling/test_batching.py::test_the_papers_layout",
            "modelling/test_batching.py::test_the_pair_layout_is_the_tokenizers",
        ],
        "check_invariance(model): batch, padding, attention, precision": [
            "rerankers/test_invariance.py::test_a_sound_model_passes",
            "rerankers/test_invariance.py::test_dependence_is_found",
            "rerankers/test_invariance.py::test_the_table_is_printed",
            "rerankers/test_invariance.py::test_bi_encoders_can_be_checked",
        ],
        "the encoder longdoc:minilm-l6 from PyPI": [
            "rerankers/test_packaged.py::test_the_packaged_encoder_is_the_one_of_pypi",
            "rerankers/test_packaged.py::test_missing_encoder",
        ],
    },
    "reading": {
        "windows cover all of a document; a document without tokens has one": [
            "modelling/test_windows.py::test_sliding_windows_follow_the_formula_and_cover_everything",
            "modelling/test_windows.py::test_a_document_without_tokens_has_one_empty_window",
        ],
        "Truncate": ["modelling/test_windows.py::test_truncate_keeps_the_beginning"],
        "WholeText": [
            "rerankers/test_longp.py::test_the_firstp_twin_is_one_argument",
            "rerankers/test_longp.py::test_texts_longer_than_the_backbone_takes_are_cut",
        ],
        "GreedyChunks": ["modelling/test_windows.py::test_greedy_chunks"],
        "SlidingWindows": ["modelling/test_windows.py::test_number_of_sliding_windows"],
        "SlidingWords": ["modelling/test_windows.py::test_word_windows_are_the_words_in_order"],
        "SentenceWindows(max_tokens, max_sentences)": [
            "modelling/test_windows.py::test_one_sentence_per_window",
            "modelling/test_windows.py::test_sentences_are_packed_until_the_next_one_does_not_fit",
        ],
        "max_windows, selection='first' and 'first_last_random'": [
            "modelling/test_windows.py::test_first_windows",
            "modelling/test_windows.py::test_first_last_and_random_windows",
            "modelling/test_windows.py::test_the_choice_of_windows_depends_on_the_document_and_the_seed_alone",
        ],
        "windows as an argument of any model": [
            "rerankers/test_rerankers.py::test_first_window_of_any_windows",
            "modelling/test_scorer.py::test_reading_can_be_changed",
        ],
        "window sizes left open adapt to the backbone; what does not fit is refused": [
            "modelling/test_windows.py::test_sizes_left_open_adapt_to_the_backbone",
            "rerankers/test_rerankers.py::test_windows_larger_than_the_backbone",
        ],
        "max_doc_len": [
            "modelling/test_scorer.py::test_a_document_budget_is_the_text_cut_after_that_many_tokens",
        ],
        "max_query_len; coverage.queries_cut": [
            "modelling/test_scorer.py::test_queries_are_cut",
            "rerankers/test_rerankers.py::test_long_queries_are_reported",
        ],
        "text_field: a column or several; missing text is empty; bytes are refused": [
            "rerankers/test_rerankers.py::test_text_fields_are_joined",
            "rerankers/test_rerankers.py::test_other_text_field",
            "rerankers/test_rerankers.py::test_missing_text_counts_as_empty",
            "rerankers/test_rerankers.py::test_bytes_are_refused",
        ],
        "text_loader, where the text column is absent": [
            "rerankers/test_rerankers.py::test_text_loader",
            "rerankers/test_rerankers.py::test_text_loader_that_does_not_supply",
        ],
        "coverage: what was read; TruncationWarning, once": [
            "modelling/test_scorer.py::test_coverage",
            "rerankers/test_rerankers.py::test_coverage",
            "rerankers/test_rerankers.py::test_one_truncation_warning",
        ],
        "explain: window_scores, window_weights, window_spans, best_start, best_end": [
            "rerankers/test_rerankers.py::test_explanations",
            "rerankers/test_rerankers.py::test_best_span_is_the_text_of_the_best_window",
            "rerankers/test_rerankers.py::test_explanation_of_score_aggregations",
        ],
        "explain: query_terms": [
            "modelling/test_cedr.py::test_query_terms_add_up",
            "modelling/test_cedr.py::test_query_terms_are_a_column",
        ],
        "preselect: the k best windows in document order, also in fit": [
            "modelling/test_preselection.py::test_every_family_reads_the_best_windows",
            "modelling/test_preselection.py::test_fit_reads_the_chosen_windows_and_leaves_the_selector_alone",
        ],
        "FirstK, BM25Windows, EmbeddingWindows, CrossEncoderWindows": [
            "modelling/test_preselection.py::test_each_selector_keeps_what_its_method_scores_best",
            "modelling/test_preselection.py::test_bm25_is_the_formula",
        ],
        "BM25Windows.from_texts: rarity of a collection": ["modelling/test_preselection.py::test_rarity_from_texts"],
        "KeyBlocks: the best blocks as one input": [
            "modelling/test_preselection.py::test_key_blocks_make_a_shorter_document",
            "modelling/test_preselection.py::test_key_blocks_that_overlap_are_merged",
        ],
        "selectors are saved with the model": ["modelling/test_preselection.py::test_saved_and_loaded"],
        "seed: the same random layers": ["modelling/test_weights.py::test_the_same_seed_gives_the_same_random_layers"],
        "verbose: a progress bar": ["rerankers/test_rerankers.py::test_progress_bar_only_if_verbose"],
    },
    "computing": {
        "dtype=None: float32 on CPUs, bfloat16 on GPUs that have it; 'fastest' what the device is best at": [
            "modelling/test_devices.py::test_the_rule",
            "modelling/test_devices.py::test_float32_is_the_default_on_every_cpu",
            "modelling/test_devices.py::test_the_fastest_precision",
        ],
        "dtype='bfloat16' and coverage.dtype": ["modelling/test_scorer.py::test_bfloat16_is_close_to_float32"],
        "device: unusable ones are named": ["rerankers/test_rerankers.py::test_gpu_that_is_not_there"],
        "batch_size, max_batch_tokens": [
            "modelling/test_passes.py::test_passes_are_all_rows_in_order_and_within_the_limits",
            "modelling/test_passes.py::test_default_limits",
        ],
        "smaller passes where memory runs out": [
            "modelling/test_scorer.py::test_smaller_passes_where_memory_runs_out",
        ],
        "texts are tokenised once, also across runs, in bounded memory": [
            "modelling/test_token_cache.py::test_every_text_once_over_two_transforms",
            "modelling/test_token_cache.py::test_the_bound_holds",
        ],
        "windows of like length go together, each distinct one once; coverage.padding": [
            "modelling/test_passes.py::test_equal_windows_are_encoded_once",
            "modelling/test_passes.py::test_padding_with_known_numbers",
        ],
        "memory is bounded whatever the run": ["modelling/test_passes.py::test_memory_grows_with_the_tokens_alone"],
        "(a ** b).compile(): one pass through a shared encoder": [
            "rerankers/test_fused.py::test_pipelines_fuse_when_compiled",
            "rerankers/test_fused.py::test_each_window_is_encoded_once",
            "rerankers/test_fused.py::test_features_rows_and_columns_are_those_of_the_union",
        ],
        "runtime: OpenVINO, compared with torch before use, made anew after training": [
            "modelling/test_runtimes.py::test_scores_are_those_of_torch_whatever_the_batch",
            "modelling/test_runtimes.py::test_an_export_serves_until_the_weights_change",
            "modelling/test_runtimes.py::test_a_wrong_export_is_found_out",
            "modelling/test_runtimes.py::test_a_missing_library",
        ],
        "runtime: torch.compile": ["modelling/test_runtimes.py::test_compiled"],
        "passes without padding on GPUs": [
            "modelling/test_packing.py::test_states_are_those_of_the_padded_pass",
            "modelling/test_packing.py::test_kernels_by_gpu",
        ],
        "score_cache: a second run reads, an interrupted one goes on": [
            "rerankers/test_score_cache.py::test_second_run_reads",
            "rerankers/test_score_cache.py::test_an_interrupted_run_goes_on",
        ],
        "score_cache: keyed by weights, settings, query and text": [
            "rerankers/test_score_cache.py::test_weights_are_part_of_the_key",
            "rerankers/test_score_cache.py::test_settings_are_part_of_the_key",
            "rerankers/test_score_cache.py::test_text_and_query_do_not_run_together",
        ],
        "pyterrier_caching.ScorerCache works, with its limits": [
            "rerankers/test_caching_interop.py::test_a_full_cache_needs_no_weights",
            "rerankers/test_caching_interop.py::test_training_leaves_old_scores_behind",
            "rerankers/test_caching_interop.py::test_explanations_are_lost",
            "rerankers/test_caching_interop.py::test_first_stage_scores_that_birch_mixes_in_are_not_seen",
            "rerankers/test_caching_interop.py::test_one_query_under_two_ids_is_refused",
        ],
        "changes of weights are noticed, also writes through .data": [
            "modelling/test_fingerprint.py::test_uncounted_writes_show_in_the_contents",
            "modelling/test_late_interaction.py::test_writes_that_torch_does_not_count",
            "rerankers/test_biencoder.py::test_embeddings_of_other_weights_are_forgotten",
        ],
        "scores that are not finite are an error": ["modelling/test_scorer.py::test_scores_that_are_not_finite"],
    },
    "training": {
        "fit on a run with text and qrels, in a pipeline, with validation": [
            "rerankers/test_pipelines.py::test_fit_in_a_pipeline",
            "rerankers/test_pipelines.py::test_fit_with_text_loader",
            "training/test_loop.py::test_models_learn",
        ],
        "TrainingArgs: frozen, every value checked, JSON": [
            "training/test_recipe.py::test_recipes_that_cannot_work",
            "training/test_recipe.py::test_recipe_as_json",
        ],
        "defaults: pairwise margin, AdamW, 1e-5 and 1e-4, warm-up of 20 %": [
            "training/test_losses.py::test_formula_and_its_gradient",
            "training/test_loop.py::test_parameters_by_learning_rate_and_decay",
            "training/test_loop.py::test_schedules",
        ],
        "learning_rates by the longest prefix; prefixes of no parameter are refused": [
            "training/test_loop.py::test_parameters_by_learning_rate_and_decay"
        ],
        "ten losses": [
            "training/test_losses.py::test_formula_and_its_gradient",
            "training/test_loop.py::test_models_learn",
        ],
        "sampling: pairs, pointwise, listwise; negatives, negative_pool, max_negative_rank, min_label, unjudged": [
            "training/test_examples.py::test_pairs",
            "training/test_examples.py::test_pointwise_takes_every_candidate_once",
            "training/test_examples.py::test_lists_have_a_positive",
            "training/test_examples.py::test_pool_of_negatives",
            "training/test_examples.py::test_negatives_up_to_a_rank",
            "training/test_examples.py::test_labels_of_examples_begin_at_min_label",
            "training/test_examples.py::test_labels",
        ],
        "schedules, warm-up, epoch_decay, restart_each_epoch, decay": [
            "training/test_loop.py::test_one_cycle_is_torchs",
            "training/test_loop.py::test_schedules",
            "training/test_loop.py::test_epochs_may_begin_anew",
            "training/test_loop.py::test_parameters_by_learning_rate_and_decay",
        ],
        "queries_per_step, queries_per_forward, reduction, max_grad_norm, gradient_checkpointing": [
            "training/test_loop.py::test_queries_per_forward_makes_no_difference",
            "training/test_loop.py::test_gradients_of_a_step",
            "training/test_loop.py::test_gradient_checkpointing_recomputes_and_makes_no_difference",
        ],
        "dropout": ["training/test_loop.py::test_without_dropout_training_computes_what_inference_does"],
        "dtype: bfloat16 and float16": ["training/test_loop.py::test_half_precision"],
        "augment: texts are changed as they are drawn": ["training/test_examples.py::test_augmented_texts"],
        "Lora: also of a pre-trained aggregator": [
            "training/test_loop.py::test_lora_trains_and_saves_like_any_model",
            "training/test_loop.py::test_lora_on_named_layers_keeps_the_best_weights",
            "rerankers/test_packaged.py::test_a_pretrained_aggregator_is_adapted_too",
        ],
        "metric, validate_steps, patience, max_steps; the best weights are taken": [
            "training/test_loop.py::test_the_best_epoch_is_kept",
            "training/test_loop.py::test_validation_every_few_steps",
            "training/test_loop.py::test_early_stopping_and_most_steps",
        ],
        "history and plot_history": [
            "training/test_loop.py::test_history",
            "training/test_loop.py::test_learning_curve_of_two_trainings",
        ],
        "trackers": ["training/test_loop.py::test_trackers"],
        "several processes": ["training/test_loop.py::test_two_processes"],
        "checkpoint: a killed run ends with the same weights; folders of other models, recipes or data are refused": [
            "training/test_resume.py::test_killed_run_ends_with_the_same_weights",
            "training/test_resume.py::test_state_of_another_training",
            "training/test_resume.py::test_state_of_another_model",
        ],
        "a diverged state or a full disk never replaces the last good state": [
            "training/test_resume.py::test_state_is_never_one_that_has_diverged",
            "training/test_resume.py::test_full_disk",
        ],
        "an interrupted fit keeps what was learned": [
            "training/test_loop.py::test_stopped_before_and_after_the_first_step",
            "training/test_loop.py::test_the_best_epoch_survives_an_interruption",
        ],
        "seeds reproduce": ["training/test_loop.py::test_the_same_seed_gives_the_same_weights"],
        "recipes(name), TrainingArgs.preset": ["training/test_recipe.py::test_presets"],
        "fit_in_turn: recipes of several rounds": ["training/test_repeat.py::test_several_runs_in_turn"],
        "start_from another model's weights": [
            "modelling/test_cedr.py::test_start_from_copies_the_encoder",
            "modelling/test_cedr.py::test_start_from_another_kind_of_encoder",
        ],
        "TeacherScores, distillation": [
            "training/test_examples.py::test_teacher_scores",
            "training/test_loop.py::test_student_in_a_pipeline",
        ],
        "pseudo_qrels": ["training/test_examples.py::test_pseudo_labels"],
        "fit_on_best_segments (BeST), also after a kill": [
            "training/test_best.py::test_first_iteration_is_equations_2_and_3",
            "training/test_best.py::test_selects_the_relevant_segments",
            "training/test_best.py::test_killed_and_resumed",
            "training/test_best.py::test_comparators",
        ],
        "k_fold_fit: no query is seen by its model; resumable; in pipelines": [
            "training/test_repeat.py::test_nothing_of_a_fold_is_seen_by_its_model",
            "training/test_repeat.py::test_interrupted_and_resumed",
            "training/test_repeat.py::test_in_a_pipeline_and_an_experiment",
            "training/test_repeat.py::test_transformer_keeps_rows_and_order",
        ],
        "fit_seeds": [
            "training/test_repeat.py::test_seeds",
            "training/test_repeat.py::test_means_over_seeds",
        ],
        "RotateDocuments, position_augmentation": [
            "data/test_rotation.py::test_rotation_keeps_every_character",
            "data/test_rotation.py::test_windows_and_sentences_stay_whole",
            "data/test_rotation.py::test_transformer_in_pipelines",
        ],
    },
    "saving": {
        "save and load: every class, all arguments, weights, tokenizer": [
            "modelling/test_checkpoint.py::test_round_trip",
            "modelling/test_checkpoint.py::test_round_trip_of_arguments",
            "modelling/test_checkpoint.py::test_any_class_is_found_in_a_new_process",
        ],
        "config.json, model.safetensors, model card, training.json; no paths": [
            "modelling/test_checkpoint.py::test_files",
            "modelling/test_checkpoint.py::test_config_and_training",
            "modelling/test_checkpoint.py::test_no_paths_but_the_backbone",
        ],
        "loading is strict": [
            "modelling/test_checkpoint.py::test_wrong_class",
            "modelling/test_checkpoint.py::test_damaged_weights",
            "modelling/test_checkpoint.py::test_newer_format_and_unknown_names",
        ],
        "a full disk leaves a saved model whole": [
            "modelling/test_checkpoint.py::test_full_disk_leaves_the_model_that_was_saved_before",
        ],
        "arguments may be changed while loading": ["modelling/test_checkpoint.py::test_arguments_may_be_changed"],
        "a model keeps the recipe of its training when it is saved again": [
            "modelling/test_checkpoint.py::test_a_loaded_model_keeps_its_recipe",
        ],
        "push_to_hub, a hub id": ["modelling/test_checkpoint.py::test_hub"],
        "pt.Artifact.load": ["modelling/test_checkpoint.py::test_artifact"],
        "save_adapter: a small difference from the backbone": [
            "rerankers/test_packaged.py::test_saved_as_a_difference",
            "rerankers/test_packaged.py::test_other_weights_underneath_are_refused",
        ],
        "longdoc:docstrings-firstp, -maxp, -avgp, -parade-attn, -parade-transformer": [
            "rerankers/test_packaged.py::test_packaged_models_rank",
            "rerankers/test_packaged.py::test_packaged_models_are_small_and_know_no_paths",
        ],
    },
    "papers": {
        "presets: every row of Table 1, backbone, windows, published figures, table()": [
            "papers/test_presets.py::test_preset_builds_its_transformer",
            "papers/test_presets.py::test_published_figures_are_those_of_the_paper",
            "papers/test_presets.py::test_partners_are_first_p_of_the_same_backbone",
            "papers/test_presets.py::test_table_and_mapping",
        ],
        "protocols: msmarco-document, trec-dl, robust04-title, robust04-description, far-relevant": [
            "papers/test_protocols.py::test_settings_are_those_of_the_paper",
            "papers/test_protocols.py::test_msmarco",
            "papers/test_protocols.py::test_trained_on_v1_for_v2",
            "papers/test_protocols.py::test_robust04",
            "papers/test_protocols.py::test_far_relevant",
        ],
        "protocols go on where they were interrupted": ["papers/test_protocols.py::test_again_is_read_from_the_folder"],
        "Protocol.compare, fold_qids, training, start_from": [
            "papers/test_protocols.py::test_models_without_fit_and_figures_of_the_paper",
            "papers/test_protocols.py::test_robust04",
            "papers/test_protocols.py::test_presets_get_the_recipe_of_the_protocol",
            "papers/test_protocols.py::test_where_models_start",
        ],
    },
    "experiments": {
        "with one run and one baseline the numbers of pt.Experiment": [
            "experiment/test_experiment.py::test_real_runs_are_evaluated_as_by_pyterrier",
            "experiment/test_experiment.py::test_ties_missing_queries_and_equal_systems",
        ],
        "systems: pipelines, files, frames, functions of seed and fold": [
            "experiment/test_systems.py::test_all_kinds_of_systems",
        ],
        "seeds averaged per query before the test": [
            "experiment/test_experiment.py::test_values_are_averaged_over_seeds_before_the_test",
        ],
        "folds": ["experiment/test_systems.py::test_folds_are_fitted_on_the_others"],
        "several baselines, partners, gains, effect sizes, intervals": [
            "experiment/test_results.py::test_comparisons_by_hand",
            "experiment/test_results.py::test_without_partners_the_gain_is_over_the_first_baseline",
        ],
        "tests: t, Wilcoxon, randomisation, bootstrap; corrections; equivalence": [
            "experiment/test_significance.py::test_students_sleep",
            "experiment/test_significance.py::test_randomisation_of_darwins_maize_is_fishers",
            "experiment/test_significance.py::test_bootstrap_test_is_the_studentised_one",
            "experiment/test_significance.py::test_corrections_by_hand",
            "experiment/test_significance.py::test_equivalence_by_hand",
            "experiment/test_significance.py::test_bootstrap_intervals_are_scipys",
        ],
        "to_markdown, to_latex, styled": [
            "experiment/test_results.py::test_markdown",
            "experiment/test_results.py::test_latex",
            "experiment/test_results.py::test_notebooks_get_the_same_cells",
        ],
        "paper_table: several test sets side by side": [
            "experiment/test_results.py::test_several_test_sets_side_by_side",
        ],
        "save_dir, resumed; ExperimentResults.load; retest, subset": [
            "experiment/test_runs.py::test_an_interrupted_experiment_goes_on",
            "experiment/test_results.py::test_results_come_back_from_their_folder",
            "experiment/test_results.py::test_a_subset_is_an_experiment_of_its_own",
        ],
        "read_run, write_run": ["experiment/test_runs.py::test_trec_files_keep_every_score"],
        "ExperimentWarning": ["experiment/test_experiment.py::test_everything_doubtful_is_named"],
        "efficiency, plot_efficiency": [
            "experiment/test_efficiency.py::test_costs_are_those_of_the_reranker_after_warming_up",
            "experiment/test_plots.py::test_gains_over_slow_downs",
        ],
        "sweep_truncation, sweep_windows, sweep_passages, sweep_depth": [
            "experiment/test_sweeps.py::test_truncation",
            "experiment/test_sweeps.py::test_windows_and_strides",
            "experiment/test_sweeps.py::test_passages_at_training_and_at_inference",
            "experiment/test_sweeps.py::test_depth",
        ],
        "by_document_length, by_query_value": [
            "experiment/test_results.py::test_breakdown_by_length_of_relevant_documents",
        ],
    },
    "language models": {
        "RankGPT(list_size, step): windows from back to front, a permutation whatever the reply": [
            "listwise/test_sliding.py::test_windows",
            "listwise/test_sliding.py::test_oracle_brings_the_true_top_ten_up_in_nine_calls_per_query",
            "listwise/test_sliding.py::test_output_is_a_permutation_whatever_the_reply",
        ],
        "RankGPT keeps PyTerrier's contract": [
            "listwise/test_contract.py::test_pyterrier_test_case",
            "listwise/test_contract.py::test_rows_columns_index_are_kept_and_input_is_unchanged",
        ],
        "a reply that holds no ranking is a failure; on_failure, retries": [
            "listwise/test_parsing.py::test_what_is_no_ranking",
            "listwise/test_sliding.py::test_failure_raises_and_says_where",
            "listwise/test_sliding.py::test_failed_window_keeps_its_order_and_says_so",
            "listwise/test_sliding.py::test_failed_window_goes_to_the_bottom",
            "listwise/test_sliding.py::test_retries_show_the_reply_and_ask_again",
        ],
        "top_k, shuffles, max_doc_len, max_prompt_tokens, tokenizer": [
            "listwise/test_sliding.py::test_only_the_top_k_are_shown",
            "listwise/test_sliding.py::test_shuffles_average_out_a_bias_for_the_first_place",
            "listwise/test_sliding.py::test_first_p_and_long_p",
            "listwise/test_sliding.py::test_prompt_budget_shrinks_the_longest",
            "listwise/test_contract.py::test_long_documents_of_tiny_tokenizer_are_cut_by_its_tokens",
        ],
        "ListwisePrompt": [
            "listwise/test_parsing.py::test_chat_turns_alternate",
            "listwise/test_parsing.py::test_wrong_templates",
            "listwise/test_parsing.py::test_no_cleaned_text_can_pass_for_an_id",
        ],
        "report: what happened to each query": ["listwise/test_sliding.py::test_counts_are_per_query"],
        "LLMClient(cache): a second run asks nothing; replay_only; a stopped run goes on": [
            "listwise/test_runs.py::test_a_second_run_asks_nothing_and_ranks_the_same",
            "listwise/test_runs.py::test_a_killed_run_goes_on_where_it_was",
        ],
        "Prices, max_cost, ledger, estimate": [
            "listwise/test_runs.py::test_ledger_per_query",
            "listwise/test_runs.py::test_estimate_asks_nothing_and_is_right",
            "listwise/test_runs.py::test_the_cap_holds_and_finished_windows_are_kept",
        ],
        "concurrency": ["listwise/test_runs.py::test_results_do_not_depend_on_concurrency"],
        "OpenAIBackend (base_url), AnthropicBackend": [
            "listwise/test_servers.py::test_a_good_reply",
            "listwise/test_models.py::test_a_packaged_openai_compatible_server",
        ],
        "HuggingFaceBackend": ["listwise/test_models.py::test_a_local_model_answers_and_counts_tokens"],
        "CallableBackend, plain functions": [
            "listwise/test_runs.py::test_ledger_per_query",
            "listwise/test_contract.py::test_a_function_must_return_text",
        ],
        "keys come from the environment and appear nowhere": [
            "listwise/test_servers.py::test_keys_appear_nowhere",
            "listwise/test_servers.py::test_missing_keys_are_named",
        ],
        "RelevanceJudge: grades of chunks; agreement with qrels": [
            "analysis/test_judging.py::test_grades",
            "analysis/test_judging.py::test_the_best_chunk_decides",
            "analysis/test_judging.py::test_agreement_is_cohens_kappa",
        ],
        "no torch and no client library is imported": [
            "listwise/test_contract.py::test_import_loads_neither_torch_nor_clients",
        ],
    },
    "collections": {
        "longdoc:docstrings: sources are parsed, never imported; topics, qrels, splits, -long": [
            "data/test_collections.py::test_sources_are_never_run_and_broken_ones_are_skipped",
            "data/test_collections.py::test_splits_partition_the_topics",
            "data/test_collections.py::test_long_variants_are_the_topics_with_a_long_document",
            "data/test_collections.py::test_the_installed_collection",
        ],
        "statistics()": ["data/test_collections.py::test_statistics_count_documents_topics_and_lengths"],
        "text_loader()": ["data/test_collections.py::test_loader_keeps_rows_index_and_columns"],
        "longdoc:folder:PATH": [
            "data/test_collections.py::test_folder_by_name",
            "data/test_collections.py::test_folder_reads_its_three_files",
            "data/test_collections.py::test_folder_names_the_malformed_line",
        ],
        "longdoc:irds:NAME decodes web pages": [
            "data/test_bodies.py::test_bodies_are_decoded",
            "data/test_bodies.py::test_pages_become_text",
            "data/test_bodies.py::test_provider_finds_datasets_of_ir_datasets",
        ],
        "far_relevant(position, tokenizer) from any passage collection, .gold": [
            "data/test_far_relevant.py::test_vaswani_has_the_properties_of_the_algorithm",
            "data/test_far_relevant.py::test_slots_are_where_the_position_says",
            "data/test_far_relevant.py::test_positions_share_filler_and_lengths",
            "data/test_far_relevant.py::test_any_source_will_do",
        ],
        "the same seed makes the same collection": [
            "data/test_far_relevant.py::test_same_seed_same_bytes_in_another_process_too",
        ],
        "write_far_relevant, read_far_relevant, longdoc:far-relevant:PATH": [
            "data/test_far_relevant.py::test_files_round_trip",
            "data/test_far_relevant.py::test_released_files_are_read",
            "data/test_far_relevant.py::test_malformed_files_are_named",
        ],
        "find_leaks, check_leaks": ["data/test_far_relevant.py::test_every_kind_of_leak_is_found"],
        "longdoc:docstrings-early, -uniform, -far": [
            "data/test_far_relevant.py::test_docstrings_have_the_properties_of_the_algorithm",
        ],
        "needle, passkey, longdoc:needle, longdoc:passkey": [
            "data/test_needle.py::test_documents_have_their_lengths_and_one_answer",
            "data/test_needle.py::test_named_collections_follow_the_protocol",
        ],
        "read_longembed, longdoc:longembed:PATH": ["data/test_needle.py::test_published_longembed_is_read"],
    },
    "positions": {
        "relevant_positions by known passages": [
            "analysis/test_positions.py::test_known_positions_come_back",
            "analysis/test_positions.py::test_gold_positions_of_far_relevant_collections_come_back",
        ],
        "relevant_positions by a judge: model, reranker or function": [
            "analysis/test_positions.py::test_a_language_model_as_judge",
            "analysis/test_positions.py::test_a_reranker_as_judge",
            "analysis/test_positions.py::test_a_function_finds_the_first_relevant_chunk_and_then_stops",
        ],
        "PassageLocator: longest common substring, then subsequence": [
            "analysis/test_locating.py::test_as_by_the_definition",
            "analysis/test_locating.py::test_verbatim_passages_are_found_exactly",
            "analysis/test_locating.py::test_passages_with_a_tenth_of_their_words_changed_are_found_nearly_exactly",
        ],
        "RelevantPositions.summary, reasons, plot": [
            "analysis/test_positions.py::test_summary",
            "analysis/test_positions.py::test_reasons_for_having_no_position",
            "analysis/test_positions.py::test_the_figure_shows_shares_of_positions_and_of_lengths",
        ],
        "position_sensitivity: table, plot": [
            "analysis/test_position_effects.py::test_the_table_by_hand",
            "analysis/test_position_effects.py::test_the_picture_of_sensitivity",
            "analysis/test_position_effects.py::test_a_model_that_reads_the_start_loses_and_one_that_reads_all_stays",
        ],
        "effectiveness_by_position: table, comparisons, ratios, plot": [
            "analysis/test_position_effects.py::test_groups_by_position",
            "analysis/test_position_effects.py::test_worst_and_best_group_of_other_queries",
            "analysis/test_position_effects.py::test_collections_with_the_same_queries_are_compared_query_by_query",
            "analysis/test_position_effects.py::test_the_picture_of_several_systems",
        ],
    },
    "commands": {
        "python -m pyterrier_longdoc: runs, table, picture, --collection, --backbone, --resume": [
            "test_main.py::test_main_job_writes_runs_table_and_picture",
            "test_main.py::test_main_job_with_a_backbone",
            "test_main.py::test_missing_demo_package_names_the_install_command",
        ],
        "the examples of README and pt_docs print what they say": [
            "test_readme.py::test_python_blocks_print_what_stands_beneath_them"
        ],
        "README's test command is that of the continuous integration": [
            "test_readme.py::test_ci_runs_the_test_command_of_the_readme",
        ],
        "the quickstart notebook runs": ["test_notebooks.py::test_notebook_runs"],
    },
}


@cache
def _node_names() -> set[str]:
    """`folder/test_file.py::test_name` of every test function of the suite."""
    return {
        f"{path.relative_to(TESTS).as_posix()}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("wing", FEATURES)
def test_every_feature_has_its_tests(wing):
    named = {node: feature for feature, nodes in FEATURES[wing].items() for node in nodes}
    missing = {node: named[node] for node in sorted(named.keys() - _node_names())}
    assert not missing, f"tests that features rely on are not there: {missing}"
    assert all(FEATURES[wing].values()), "a feature without a test"
