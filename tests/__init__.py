import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read once, when torch is imported
