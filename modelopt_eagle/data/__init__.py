"""Conversations in, token rows with supervised flags out; prompts, answers by the target, and the draft vocabulary."""

from modelopt_eagle.data.batches import plan_batches
from modelopt_eagle.data.conversations import Conversation, ConversationSet, conversations_of, read_conversations
from modelopt_eagle.data.dataset import TokenizedDataset, prepare_dataset, prepare_rows, render, tokenize_conversations
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.data.prompts import Prompt, load_prompts
from modelopt_eagle.data.report import DataReport
from modelopt_eagle.data.roles import Message
from modelopt_eagle.data.template import render_text
from modelopt_eagle.target.identity import template_hash

__all__ = [
    "Conversation",
    "ConversationSet",
    "DataReport",
    "Message",
    "Prompt",
    "TokenizedDataset",
    "TokenizedRow",
    "conversations_of",
    "load_prompts",
    "plan_batches",
    "prepare_dataset",
    "prepare_rows",
    "read_conversations",
    "render",
    "render_text",
    "template_hash",
    "tokenize_conversations",
]
