"""Graph passes: one plain function `verb_noun(gm, plan)` per file; `rewriter.pipeline` holds their order."""
