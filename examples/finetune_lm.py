"""LoRA fine-tuning of a language model with the Hugging Face Trainer and peft.

Without --model it makes a tiny Llama and a tokenizer on the spot, so that nothing is downloaded.
"""

import argparse
from pathlib import Path

from data import text
from peft import LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from gossipx.integrations.transformers import GossipCallback  # gossipx


def tiny(words: str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a model with random weights, and a tokenizer for a text."""
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator([words], vocab_size=1000, special_tokens=["<pad>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a name that AutoModelForCausalLM knows; default: a tiny one")
    parser.add_argument("--text", type=Path, help="a text file; default: most of the King James Bible")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context", type=int, default=64, help="tokens per sample")
    parser.add_argument("--limit", type=int, default=1_000_000, help="characters of the text to use")
    args = parser.parse_args()

    words = text(args.text)[: args.limit]
    if args.model is None:
        model, tokenizer = tiny(words)
    else:
        model, tokenizer = (kind.from_pretrained(args.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()

    tokens = tokenizer(words)["input_ids"]
    samples = [{"input_ids": tokens[at : at + args.context]} for at in range(0, len(tokens), args.context)]
    held_out = max(1, len(samples) // 20)
    train, test = samples[:-held_out], samples[-held_out:]
    output = Path("finetuned")
    gossip = GossipCallback()  # gossipx
    train = gossip.shard(train)  # gossipx
    output = gossip.directory  # gossipx
    trainer = Trainer(
        model,
        TrainingArguments(
            str(output / "checkpoints"),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.add_callback(gossip)  # gossipx
    print(f"before: loss {trainer.evaluate()['eval_loss']:.3f}")
    trainer.train()
    print(f"after: loss {trainer.evaluate()['eval_loss']:.3f}")
    model.save_pretrained(output / "adapter")


if __name__ == "__main__":
    main()
