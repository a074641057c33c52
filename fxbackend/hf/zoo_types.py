"""What the zoo's one rule for all types cannot know: per type, with the reason; variants; and the types left out."""

from __future__ import annotations

from collections.abc import Mapping

from fxbackend.hf.tiny import WINDOW

_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_LINEAR_MIXER = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_INDEXER = {"index_topk": 4, "index_n_heads": 4, "index_head_dim": 32}  # picks 4 tokens, so that picking matters

# Latent attention whose rotary module reads the head size, which is that of the rotated part.
_LATENT = {"head_dim": 16}

OVERRIDES: Mapping[str, Mapping[str, object]] = {
    "afmoe": {"mup_enabled": True},
    "axk2": _INDEXER,
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},  # the default has no attention at all
    "big_bird": {"attention_type": "original_full"},  # what block_sparse becomes for rows as short as ours
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {  # four models of their own sizes
        "patcher_config": {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 96,
        },
        "encoder_config": {
            "hidden_size": 64,
            "hidden_size_global": 128,
            "num_attention_heads": 2,
            "intermediate_size": 96,
        },
        "decoder_config": {
            "hidden_size": 64,
            "hidden_size_global": 128,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
        },
        "global_config": {
            "hidden_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 192,
        },
        "encoder_hash_byte_group_vocab": 199,
        "encoder_hash_byte_group_size": [3],
        "vocab_size": 260,
    },
    "cohere_compass_text": {
        "rope_parameters": {  # a rope per kind of layer, in three sections
            kind: {**_ROPE, "mrope_section": [6, 5, 5]} for kind in ("sliding_attention", "full_attention")
        }
    },
    "dbrx": {  # sizes of attention and experts are in parts of their own
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 100.0},
        "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v32": _INDEXER,
    "deepseek_v4": {  # one layer of each kind; sizes of the compressor and of the hyper-connections
        **_INDEXER,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 32,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
    },
    "electra": {"embedding_size": 64},  # narrower than the layers, so that the projection between is there
    "ernie": {"use_task_id": True},
    "falcon_h1": {
        **_MAMBA2,
        "mamba_n_heads": 4,
        "mamba_d_ssm": 128,
        "mlp_multipliers": [0.7, 1.3],
        "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
    },
    "gemma3n_text": {  # two layers that reuse keys and values, one of each kind
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "laurel_rank": 16,
        "hidden_size_per_layer_input": 32,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "global_head_dim": 64,
    },
    "gemma4_unified_text": {"global_head_dim": 64},
    "git": {
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
        }
    },
    "glm_moe_dsa": _INDEXER,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},  # the default is for 24 layers
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "hy_v4": _INDEXER,
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
        "d_rel": 8,
        "rel_extent": 8,
        "log_scaling_n_floor": 4,
        "logits_mup_width_multiplier": 1.5,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },  # one layer of each kind
    "kimi_linear": {
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "laguna": {"num_attention_heads_per_layer": [4, 2, 4]},  # the one type whose layers differ in heads
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {  # dense and expert layers, chunked and full ones, a temperature that grows within our rows
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.3,
    },
    "longcat_flash": {**_LATENT, "zero_expert_num": 2, "n_routed_experts": 4},
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1]},  # which is passed over without an image
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "mimo_v2_flash": {"v_head_dim": 16},  # values narrower than queries
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 8,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.7,
        "linear_attn_alpha_factor": 1.2,
        "linear_attn_beta_factor": 0.8,
        "mlp_alpha_factor": 1.1,
        "mlp_beta_factor": 0.9,
    },
    "modernbert-decoder": {"local_attention": 2 * WINDOW},  # it halves the window
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "num_key_value_heads": 2,
    },
    "olmo_hybrid": _LINEAR_MIXER,
    "opt": {"ffn_dim": 192},
    "phi4_multimodal": {  # the text model lies beside two encoders
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 32,
        },
    },
    "qwen3_5_moe_text": _LINEAR_MIXER,
    "qwen3_5_text": _LINEAR_MIXER,
    "qwen3_next": _LINEAR_MIXER,
    "qwen4_exp_text": {
        **_LINEAR_MIXER,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 128},
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [64, 64],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "rembert": {"input_embedding_size": 64, "output_embedding_size": 96},
    "roc_bert": {
        "pronunciation_embed_dim": 32,
        "shape_embed_dim": 48,
        "shape_vocab_size": 211,
        "pronunciation_vocab_size": 223,
    },
    "rwkv": {"rescale_every": 0},  # otherwise its forward changes its own weights
    "xlm": {"causal": True},  # the default attends to later tokens
    "xlnet": {"attn_type": "uni"},  # the default attends to later tokens
    "xlstm": {"num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],  # that share one
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 16,
        "num_key_value_heads": 4,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "adapter_rank": 16,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "num_hidden_layers": 3,
        "router_hidden_size": 32,
    },
}

# Other switches of a type that change what its graph looks like.
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "bloom:post_norm": {"apply_residual_connection_post_layernorm": True},
    "deepseek_v3:no_query_rank": {"q_lora_rank": None, "rope_interleave": False},
    "doge:moe": {"is_moe": True},
    "falcon:alibi": {"alibi": True},
    "falcon:new": {"new_decoder_architecture": True},
    "falcon:serial": {"multi_query": False, "parallel_attn": False, "num_kv_heads": 4},
    "gemma4_text:moe": {"enable_moe_block": True, "attention_k_eq_v": True},
    "gpt2:layer_scale": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "gpt_bigcode:heads": {"multi_query": False},
    "llama:llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama:tied": {"tie_word_embeddings": True},
    "llama:yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "minimax_m3_vl_text:sparse": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "mpt:clipped": {"attn_config": {"alibi": True, "clip_qkv": 1.5, "softmax_scale": 0.3}},
    "opt:post_norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 64},
    "roformer:rotary_value": {"rotary_value": True, "embedding_size": 64},
    "trocr:sinusoidal": {"use_learned_position_embeddings": False},
}

_COMPOSITE = "images or sound are part of its one class; its text model is "
EXCLUDED: Mapping[str, str] = {
    "gemma3": _COMPOSITE + "gemma3_text",
    "gemma3n": _COMPOSITE + "gemma3n_text",
    "gemma4": _COMPOSITE + "gemma4_text",
    "gemma4_unified": _COMPOSITE + "gemma4_unified_text",
    "got_ocr2": _COMPOSITE + "qwen2",
    "gemma4_assistant": "it drafts from the hidden states of another model, and takes no tokens alone",
    "gemma4_unified_assistant": "it drafts from the hidden states of another model, and takes no tokens alone",
    "llama4": "its causal class is that of llama4_text, with the same config",
    "qwen3_5": "its causal class is that of qwen3_5_text, with the same config",
    "qwen3_5_moe": "its causal class is that of qwen3_5_moe_text, with the same config",
    "qwen4_exp": "its causal class is that of qwen4_exp_text, with the same config",
    "musicgen": "its tokens are several audio codebooks at once",
    "musicgen_melody": "its tokens are several audio codebooks at once",
}
