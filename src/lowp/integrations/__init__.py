"""lowp in the training loops of other libraries: a module for each, which needs that library and is loaded by itself.

    from lowp.integrations.lightning import LowpPrecision
    from lowp.integrations.transformers import LowpTrainer
    from lowp.integrations.accelerate import LowpAccelerator

They use the public names of lowp alone (a test says so), as an integration of your own can.
"""
