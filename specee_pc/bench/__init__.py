"""`specee-pc bench`: a model in each mode against stock llama.cpp, measured in one run.

runner tells the story; worker is the process that computes, one per library and mode.
"""
