//! Names in other programs of the run file's sections, keys and values.
//!
//! An alias of a key is the same setting, counted in the same unit; an alias of a value means that value.
//! Errors propose the name of ours, and no alias is accepted in a run file. Names of settings that are not
//! quite the same have a row in the other tables of this folder.

/// A name of the run file (`section`, `section.key` or `section.key=value`), and its aliases, separated by
/// spaces. Rows are in the order of docs/configuration.md.
pub(super) const ROWS: &[(&str, &str)] = &[
    // [model]
    ("model", "model_args architecture transformer"),
    (
        "model.init_from",
        "model hf_model m pretrained model_name_or_path checkpoint base_model model_name \
         pretrained_model_name_or_path pretrained_model model_path model_id init_checkpoint load_weights \
         load_from from_pretrained base_model_name_or_path",
    ),
    ("model.family", "model_type name architecture model_arch arch"),
    (
        "model.dim",
        "n_embd hidden_size d_model embed_dim hidden_dim width embedding_dim n_embed model_dim emb_dim",
    ),
    (
        "model.layers",
        "n_layer n_layers num_hidden_layers num_layers depth n_blocks num_blocks num_transformer_layers \
         nlayers",
    ),
    (
        "model.heads",
        "n_head n_heads num_attention_heads num_heads num_query_heads query_heads n_attention_heads nhead",
    ),
    ("model.kv_heads", "n_kv_heads n_kv_head num_key_value_heads num_kv_heads num_query_groups"),
    ("model.head_dim", "d_head head_size kv_channels attention_head_dim dim_head"),
    (
        "model.ffn_dim",
        "intermediate_size ffn_hidden_size mlp_dim n_inner d_ff hidden_features ffn_hidden_dim \
         mlp_hidden_size mlp_hidden_dim dim_feedforward",
    ),
    ("model.vocab_size", "n_vocab padded_vocab_size"),
    ("model.max_position_embeddings", "n_positions max_position"),
    ("model.rope_theta", "rope_base rotary_base theta rotary_emb_base rope_freq_base"),
    (
        "model.norm_eps",
        "rms_norm_eps layer_norm_eps layernorm_epsilon norm_epsilon rms_norm_epsilon layer_norm_epsilon",
    ),
    (
        "model.tie_embeddings",
        "tie_word_embeddings weight_tying tied_embeddings enable_weight_tying tie_weights share_embeddings \
         tie_embedding",
    ),
    ("model.qkv_bias", "attention_bias bias add_qkv_bias attn_bias"),
    ("model.qk_norm", "use_qk_norm qk_layernorm qk_normalization"),
    ("model.dropout", "resid_pdrop hidden_dropout"),
    ("model.init_std", "initializer_range init_method_std"),
    ("model.z_loss", "z_loss_weight z_loss_coef"),
    // [experts]
    ("experts", "moe mixture moe_args router"),
    ("experts.count", "num_experts n_experts num_local_experts n_routed_experts num_moe_experts"),
    (
        "experts.per_token",
        "num_experts_per_tok num_experts_per_token top_k moe_top_k moe_router_topk experts_per_token",
    ),
    ("experts.ffn_dim", "moe_intermediate_size moe_ffn_hidden_size moe_hidden_dim moe_inter_dim expert_dim"),
    ("experts.shared_ffn_dim", "shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    ("experts.score", "scoring_func score_func score_function moe_router_score_function"),
    ("experts.normalise", "norm_topk_prob route_norm normalize renormalize"),
    ("experts.scale", "routed_scaling_factor route_scale moe_router_topk_scaling_factor"),
    ("experts.groups", "n_group n_expert_groups num_expert_groups moe_router_num_groups"),
    ("experts.top_groups", "topk_group n_limited_groups num_limited_groups moe_router_group_topk"),
    ("experts.dense_blocks", "mlp_only_layers"),
    ("experts.balance", "load_balancing moe_router_load_balancing_type aux_loss"),
    ("experts.balance=loss", "aux_loss aux auxiliary"),
    ("experts.balance=bias", "aux_loss_free aux-loss-free loss_free"),
    ("experts.balance=none", "off false"),
    (
        "experts.balance_loss",
        "router_aux_loss_coef aux_loss_alpha moe_aux_loss_coeff moe_aux_loss_coef aux_loss_coef",
    ),
    (
        "experts.bias_rate",
        "moe_router_bias_update_rate bias_update_speed bias_update_rate load_balance_coeff",
    ),
    ("experts.z_loss", "router_z_loss_coef moe_z_loss_coeff router_z_loss"),
    // [adapter]
    ("adapter", "lora peft lora_config peft_config"),
    ("adapter.rank", "lora_r lora_rank lora_dim r adapter_rank"),
    ("adapter.alpha", "lora_alpha"),
    ("adapter.dropout", "lora_dropout"),
    ("adapter.targets", "lora_target_modules target_modules lora_target"),
    ("adapter.targets=all-linear", "all all_linear"),
    // [data]
    ("data", "dataset dataloader tokenizer data_args"),
    (
        "data.train",
        "text_file inputs input_file dataset dataset_path train_data train_path path input corpus train_file \
         train_files train_bin train_data_path train_dataset train_ds input_bin data_dir data_path data_file \
         data_files dataset_dir",
    ),
    (
        "data.valid",
        "val validation valid_data val_path test validation_file val_file valid_file eval_file eval_dataset \
         eval_data val_data validation_data val_dataset valid_path valid_data_path val_bin input_val_bin \
         test_file",
    ),
    (
        "data.held_out",
        "val_fraction valid_fraction test_size val_split val_set_size validation_split test_split_size \
         val_ratio valid_split split_ratio",
    ),
    (
        "data.tokenizer",
        "tokenizer_path tokenizer_name encoding tokenizer_name_or_path tokenizer_file tokenizer_dir",
    ),
    ("data.begin_of_document", "add_bos add_bos_token bos prepend_bos"),
    ("data.end_of_document", "eod append_eod eos_token eod_token end_token eos document_end"),
    (
        "data.seq_len",
        "ctx block_size sequence_length max_seq_len context_length n_ctx max_length seq_length sequence_len \
         max_context_length max_sequence_length max_seq_length context_size context_window ctx_len seqlen \
         cutoff_len model_max_length",
    ),
    (
        "data.document_mask",
        "packing_mask reset_attention_mask intra_document_mask reset_position_ids document_masking \
         use_document_mask",
    ),
    ("data.separator", "document_separator delimiter doc_separator document_delimiter"),
    (
        "data.text_field",
        "column key json_keys text_column text_key content_field dataset_text_field text_column_name field \
         column_name json_key content_key",
    ),
    ("data.chat_template", "chat_template_path chat_template_jinja chat_template_file"),
    ("data.chat_template_kwargs", "apply_chat_template_kwargs template_kwargs"),
    ("data.packing=whole", "true bfd"),
    ("data.packing=none", "false"),
    ("data.skip_bad_rows", "skip_errors ignore_errors max_bad_rows skip_bad_lines"),
    (
        "data.cache_dir",
        "cache dataset_cache preprocessing_cache dataset_prepared_path dataset_cache_dir data_cache_path",
    ),
    // [precision]
    ("precision", "dtype mixed_precision quantize float8 fp8_config"),
    (
        "precision.recipe",
        "dtype mixed_precision precision torch_dtype mixed_precision_param compute_dtype model_dtype \
         amp_dtype matmul_dtype recipe_name fp8_recipe",
    ),
    ("precision.skip", "filter_fqns skip_modules ignored_layers modules_to_not_convert"),
    ("precision.bf16_first_layers", "num_layers_at_start_in_bf16"),
    ("precision.bf16_last_layers", "num_layers_at_end_in_bf16"),
    ("precision.head", "lm_head fp8_head fp8_lm_head"),
    ("precision.pow2_scales", "round_scales_to_power_of_2 force_pow_2_scales"),
    ("precision.amax_history_len", "amax_history_length fp8_amax_history_len"),
    ("precision.amax_compute", "amax_compute_algo fp8_amax_compute_algo"),
    ("precision.margin", "fp8_margin"),
    ("precision.static_scales", "static_scale scaling_type scales"),
    // [optimizer]
    ("optimizer", "optim adamw"),
    ("optimizer.lr", "learning_rate max_lr peak_lr base_lr max_learning_rate peak_learning_rate"),
    ("optimizer.momentum", "muon_momentum"),
    ("optimizer.betas", "adam_betas"),
    ("optimizer.eps", "epsilon adam_eps adam_epsilon"),
    ("optimizer.moments", "exp_avg_dtype exp_avg_sq_dtype optimizer_state_dtype opt_m_dtype opt_v_dtype"),
    ("optimizer.weight_decay", "wd"),
    (
        "optimizer.grad_clip",
        "max_norm max_grad_norm clip_grad clip_grad_norm gradient_clipping gradient_clip_val gradient_clip \
         grad_norm_clip clip max_gradient_norm",
    ),
    // [schedule]
    ("schedule", "lr_scheduler scheduler lr_schedule"),
    (
        "schedule.kind",
        "lr_scheduler_type lr_scheduler name type lr_schedule lr_schedule_type lr_decay_style scheduler \
         scheduler_type",
    ),
    (
        "schedule.warmup_steps",
        "warmup_iters warmup num_warmup_steps warmup_num_steps lr_warmup_steps lr_warmup_iters \
         linear_warmup_steps",
    ),
    (
        "schedule.min_lr_ratio",
        "min_lr_factor final_lr_fraction min_lr_rate cosine_min_lr_ratio learning_rate_decay_frac \
         final_lr_frac min_lr_frac",
    ),
    ("schedule.min_lr", "final_lr min_learning_rate lr_end end_lr eta_min"),
    (
        "schedule.decay_steps",
        "num_decay_steps cooldown_steps lr_wsd_decay_iters cooldown_iters warmdown_iters",
    ),
    ("schedule.decay_fraction", "decay_ratio cooldown_fraction warmdown_ratio decay_frac cooldown_frac"),
    ("schedule.decay_shape", "cooldown_type lr_wsd_decay_style"),
    // [train]
    ("train", "training trainer job activation_checkpoint training_args hyperparameters debug"),
    (
        "train.steps",
        "max_iters max_steps num_steps iterations n_steps train_iters num_iterations num_iters \
         max_iterations train_steps max_train_steps training_steps num_training_steps total_steps \
         total_training_steps n_iters iters",
    ),
    ("train.tokens", "max_tokens total_tokens num_tokens train_tokens training_tokens n_tokens token_budget"),
    ("train.epochs", "num_epochs num_train_epochs max_epochs n_epochs train_epochs total_epochs n_epoch"),
    (
        "train.batch_size",
        "b global_batch_size bs batch train_batch_size global_batch effective_batch_size gbs",
    ),
    (
        "train.micro_batch_size",
        "local_batch_size per_device_train_batch_size device_batch_size mbs microbatch_size \
         train_micro_batch_size_per_gpu micro_batch micro_bs microbatch per_device_batch_size \
         per_gpu_train_batch_size per_gpu_batch_size batch_size_per_gpu",
    ),
    ("train.seed", "random_seed data_seed global_seed rng_seed manual_seed train_seed"),
    (
        "train.recompute",
        "activation_checkpoint activation_checkpointing gradient_checkpointing ac recompute_block mode \
         gradient_checkpoint grad_checkpoint checkpoint_activations recompute_granularity \
         recompute_activations activation_recompute",
    ),
    ("train.recompute=auto", "memory_budget default"),
    ("train.recompute=none", "off false 0 no"),
    ("train.recompute=norms", "selective norm partial"),
    ("train.recompute=block", "full true on blocks layer all uniform"),
    (
        "train.recompute_blocks",
        "recompute_layers recompute_num_layers checkpoint_num_layers activations_checkpoint_num_layers",
    ),
    ("train.loss_chunk", "loss_chunk_size logits_chunk ce_chunk chunk_size"),
    ("train.device", "backend accelerator device_type"),
    ("train.device=cuda", "gpu nvidia"),
    (
        "train.attention_deterministic",
        "deterministic deterministic_attention use_deterministic_algorithms deterministic_mode \
         full_determinism",
    ),
    (
        "train.threads",
        "num_threads n_threads num_cpu_threads num_cpu_threads_per_process cpu_threads omp_num_threads",
    ),
    (
        "train.max_time",
        "time_limit max_hours max_train_time timeout max_minutes max_seconds max_duration wall_time walltime \
         exit_duration",
    ),
    (
        "train.out",
        "out_dir output_dir dump_folder save_dir run_dir output_folder output_path work_dir default_root_dir \
         project_dir run_folder",
    ),
    ("train.started_in", "base_dir root root_dir cwd working_dir relative_to"),
    ("train.max_nonfinite_steps", "max_nan_steps nan_limit"),
    ("train.stop_on_divergence", "stop_on_nan divergence terminate_on_nan stop_on_spike"),
    (
        "train.check_numerics",
        "detect_anomaly check_nan debug_nans anomaly_detection check_for_nan_in_loss_and_grad",
    ),
    // [parallel]
    (
        "parallel",
        "parallelism parallelism_config distributed ddp fsdp fsdp_config deepspeed_config zero_optimization \
         comm",
    ),
    (
        "parallel.shard",
        "strategy mode sharding sharding_strategy zero_stage stage fsdp zero zero_level \
         data_parallel_sharding_strategy",
    ),
    ("parallel.shard=none", "ddp dp data_parallel replicate no_shard zero0 0 off false"),
    ("parallel.shard=optimizer", "zero zero1 1 stage1 distributed_optimizer optim optimizer_state"),
    ("parallel.shard=gradients", "zero2 2 stage2 shard_grad_op optim_grads grad gradient"),
    (
        "parallel.shard=weights",
        "zero3 3 stage3 fsdp fsdp1 fsdp2 full_shard full weight parameters optim_grads_params true",
    ),
    (
        "parallel.replicas",
        "replicate num_replicas dp_replicate data_parallel_replicate_degree \
         num_distributed_optimizer_instances replicate_degree dp_replicate_size dp_replicate_degree",
    ),
    (
        "parallel.expert",
        "ep ep_size ep_degree expert_parallel expert_parallel_degree expert_parallel_size \
         expert_model_parallel_size autoep_size moe_expert_parallel_size",
    ),
    (
        "parallel.tensor",
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree \
         tensor_model_parallel_size model_parallel_size mp_size autotp_size",
    ),
    (
        "parallel.pipeline",
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_degree pipeline_parallel_size \
         pipeline_model_parallel_size pipeline_stages num_stages",
    ),
    ("parallel.reduce", "reduction gradient_reduction deterministic_reduce"),
    ("parallel.reduce=same-world", "default rank ranks sum"),
    ("parallel.reduce=any-world", "deterministic reproducible exact tree any"),
    ("parallel.reduce=fast", "nccl reduce-scatter reduce_scatter nondeterministic"),
    (
        "parallel.reduce_dtype",
        "grad_reduce_dtype mixed_precision_reduce communication_dtype communication_data_type",
    ),
    ("parallel.reduce_dtype=fp32", "f32 float32 float"),
    ("parallel.reduce_dtype=bf16", "bfloat16 half"),
    ("parallel.prefetch_blocks", "prefetch forward_prefetch backward_prefetch prefetch_count"),
    (
        "parallel.gather",
        "enable_fsdp_float8_all_gather fp8_param_gather fp8_param gather_dtype all_gather param_dtype \
         fsdp_float8_all_gather",
    ),
    ("parallel.gather=auto", "fp8 float8 8bit true"),
    ("parallel.gather=fp32", "f32 float32 master"),
    ("parallel.gather=bf16", "bfloat16 false"),
    (
        "parallel.transport",
        "backend comm_backend dist_backend distributed_backend init_backend ddp_backend comm_backend_name \
         communication_backend",
    ),
    ("parallel.transport=auto", "default cpu:gloo,cuda:nccl"),
    ("parallel.transport=copy", "p2p peer nvlink symm_mem symmetric_memory copy_engine"),
    ("parallel.transport=nccl", "NCCL gpu cuda"),
    ("parallel.transport=host", "gloo tcp cpu mpi"),
    ("parallel.start_timeout", "init_timeout init_timeout_seconds rdzv_timeout"),
    (
        "parallel.timeout",
        "train_timeout_seconds nccl_timeout ddp_timeout distributed_timeout_minutes comm_timeout",
    ),
    ("parallel.name_collectives", "flight_recorder trace_buf_size desync_debug"),
    // [checkpoint]
    ("checkpoint", "checkpointing save export"),
    (
        "checkpoint.every",
        "interval save_steps save_interval save_every ckpt_interval save_every_n_steps ckpt_every \
         checkpoint_interval checkpoint_every save_freq steps_per_save save_iters",
    ),
    (
        "checkpoint.keep_last",
        "keep_latest_k save_total_limit keep ckpt_keep_n max_checkpoints max_to_keep keep_last_n",
    ),
    ("checkpoint.keep_every", "keep_interval archive_every ckpt_major"),
    ("checkpoint.keep_best", "save_best load_best_model_at_end"),
    ("checkpoint.export_hf", "last_save_in_hf save_hf export"),
    ("checkpoint.export_dtype", "export_precision save_dtype weights_export_dtype"),
    // [log]
    ("log", "logging metrics monitoring"),
    (
        "log.every",
        "log_interval logging_steps log_freq log_every interval logging_interval log_every_n_steps \
         steps_per_print steps_per_report print_every print_freq log_steps",
    ),
    ("log.tensorboard", "enable_tensorboard tb use_tensorboard"),
    ("log.jsonl", "json metrics metrics_file"),
    ("log.command", "hook"),
    // [eval]
    ("eval", "validation validator evaluation generate sample"),
    (
        "eval.every",
        "eval_interval eval_steps eval_every freq interval eval_freq val_interval val_loss_every \
         eval_every_n_steps validation_interval val_check_interval steps_per_eval val_freq",
    ),
    ("eval.tokens", "eval_tokens"),
    ("eval.at_end", "eval_at_end final_eval"),
    ("eval.prompts", "prompt start samples sample_prompts generation_prompts sample_prompt"),
    ("eval.chats", "questions sample_chats chat_prompts"),
    (
        "eval.max_tokens",
        "max_new_tokens sample_tokens num_tokens_to_generate generation_max_new_tokens eval_max_new_tokens",
    ),
    ("eval.temperature", "temp sample_temperature generation_temperature"),
];
