import traceback, torch, pytest
from datasets import Dataset
def show(name, f):
    try:
        r = f()
        print(f"\n## {name}: OK {r}")
    except BaseException as e:
        print(f"\n## {name}: {type(e).__module__}.{type(e).__name__}: {str(e)[:420]}")
def test_probe(make_trainer, base, config, plain, model_dir, tmp_path):
    import peft
    from peft import LoraConfig, get_peft_model, PeftModel
    from qlora_rl import load_base
    n = [0]
    def cfg(**k):
        n[0] += 1
        return config(output_dir=str(tmp_path / f"r{n[0]}"), **k)
    L = dict(r=4, target_modules=["q_proj"])
    def run(train=True, **k):
        k.setdefault("args", cfg())
        t = make_trainer(**k)
        if train: t.train()
        return sorted({x.split(".")[-3] if "lora" in x else x for x, p in t.model.named_parameters() if p.requires_grad})
    show("ia3", lambda: run(peft_config=peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])))
    show("prompt", lambda: run(peft_config=peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    show("prefix", lambda: run(peft_config=peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    show("dora", lambda: run(peft_config=LoraConfig(**L, use_dora=True)))
    show("mts", lambda: run(peft_config=LoraConfig(**L, modules_to_save=["embed_tokens"])))
    show("lm_head", lambda: run(peft_config=LoraConfig(r=4, target_modules=["q_proj", "lm_head"])))
    show("rank600", lambda: run(peft_config=LoraConfig(r=600, target_modules=["q_proj"])))
    show("rank100", lambda: run(peft_config=LoraConfig(r=100, target_modules=["q_proj"])))
    show("bias", lambda: run(peft_config=LoraConfig(**L, bias="all")))
    show("nope", lambda: run(peft_config=LoraConfig(r=4, target_modules=["nope"])))
    show("dict", lambda: run(peft_config={"r": 4}))
    show("none", lambda: run(peft_config=None))
    fresh = lambda **k: get_peft_model(load_base(base), LoraConfig(**L), **k)
    show("peft ia3", lambda: run(peft_config=None, model=get_peft_model(load_base(base), peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]))))
    show("peft dora", lambda: run(peft_config=None, model=get_peft_model(load_base(base), LoraConfig(**L, use_dora=True))))
    show("peft", lambda: run(peft_config=None, model=fresh()))
    show("peft beta", lambda: run(peft_config=None, model=fresh(), args=cfg(beta=0.1)))
    def twice():
        m = fresh()
        run(peft_config=None, model=m, args=cfg(beta=0.1)); return run(peft_config=None, model=m, args=cfg(beta=0.1))
    show("peft beta twice", twice)
    def twice2():
        m = fresh()
        run(peft_config=None, model=m, args=cfg(beta=0.1)); return run(peft_config=None, model=m, args=cfg())
    show("peft beta then 0", twice2)
    show("named beta", lambda: run(peft_config=None, model=fresh(adapter_name="mine"), args=cfg(beta=0.1)))
    show("named", lambda: run(peft_config=None, model=fresh(adapter_name="mine")))
    def frozen():
        fresh().save_pretrained(tmp_path / "ad")
        return run(peft_config=None, model=PeftModel.from_pretrained(load_base(base), tmp_path / "ad"))
    show("frozen", frozen)
    show("init kwargs", lambda: run(model=str(model_dir), args=cfg(model_init_kwargs={"device_map": None, "low_cpu_mem_usage": True})))
    show("init kwargs attn", lambda: run(model=str(model_dir), args=cfg(model_init_kwargs={"attn_implementation": "eager"})))
    show("init kwargs revision+base", lambda: run(args=cfg(model_init_kwargs={"revision": "x", "dtype": "float16"})))
    show("init kwargs object", lambda: run(model=load_base(base), args=cfg(model_init_kwargs={"dtype": "float16"})))
    show("pad image", lambda: run(train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}], "image": "x"}] * 4)))
    show("block image", lambda: run(train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "1+1="}]}]}] * 4)))
    from transformers import AutoModelForCausalLM, AutoConfig
    show("noname", lambda: run(model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.bfloat16)))
    def opt():
        m = load_base(base)
        return run(model=m, optimizers=(torch.optim.SGD(m.parameters(), lr=1.0), None))
    show("optim wrong", opt)
    show("rewards tuple", lambda: run(reward_funcs=(lambda completions, **k: [1.0] * len(completions),)))
    show("rewards none", lambda: run(reward_funcs=None))
    show("tools", lambda: run(tools=[lambda x: x]))
    show("vllm mode", lambda: run(args=cfg(vllm_mode="foo")))
    show("is mode", lambda: run(train=False, args=cfg(vllm_importance_sampling_mode="foo")))
