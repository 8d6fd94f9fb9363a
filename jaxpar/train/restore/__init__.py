"""Loading of a folder on any mesh: a run's state, or the weights of a run, a Hugging Face folder or
a PEFT adapter; and the conversion of one into the other.

Read `metadata` first: the values that are saved beside a state, which also say what a program had
given a run, and refuse a checkpoint of another model or optimizer. `which_step` chooses a
checkpoint that is whole, and `load` reads it, puts it together with frozen weights, and loads the
weights of any folder, whose model `folder_model` knows. `convert` imports and exports.
"""

from jaxpar.train.restore.convert import (
    config_of,
    export_run,
    folder_config,
    import_run,
    keep_import,
    require_new_run,
)
from jaxpar.train.restore.folder_model import (
    adapters_of,
    frozen_folder,
    model_of,
    same_folder,
)
from jaxpar.train.restore.load import (
    drop_stages,
    hooks_with_arrays,
    load_params,
    load_run,
    restore_hook,
    restore_state,
)
from jaxpar.train.restore.metadata import (
    OPTIMIZER_FINGERPRINT,
    TEACHER,
    fingerprint,
    given_notes,
    saved_hooks,
    saved_part,
    state_metadata,
    sum_of_bits,
)

__all__ = [
    "OPTIMIZER_FINGERPRINT",
    "TEACHER",
    "adapters_of",
    "config_of",
    "drop_stages",
    "export_run",
    "fingerprint",
    "folder_config",
    "frozen_folder",
    "given_notes",
    "hooks_with_arrays",
    "import_run",
    "keep_import",
    "load_params",
    "load_run",
    "model_of",
    "require_new_run",
    "restore_hook",
    "restore_state",
    "same_folder",
    "saved_hooks",
    "saved_part",
    "state_metadata",
    "sum_of_bits",
]
