"""Stages of a pipeline that are lost for good, set from the stages beside them. Pure.

Blagoev, Ersoy and Chen, "All is Not Lost: LLM Recovery without Checkpoints" (2025), CheckFree: a
lost stage becomes the mean of the stages before and after it, because neighbouring layers of a
residual network resemble each other. The result is another model than the one that was lost; so it
is asked for, bounded, and marked.
"""
