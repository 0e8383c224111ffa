from tests.service.engine.exl2_engine.interpreted import use_interpreter

use_interpreter()
