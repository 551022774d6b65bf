# HYBRIDQ_SANITIZE: every target gets the sanitizers; any report ends the program.
if(HYBRIDQ_SANITIZE)
  add_compile_options(-fsanitize=${HYBRIDQ_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${HYBRIDQ_SANITIZE})
  message(STATUS "hybridq: sanitizers ${HYBRIDQ_SANITIZE}")
endif()
