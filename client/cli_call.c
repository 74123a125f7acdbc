/* The connection of a command, and calls that wait. */
#include "cli.h"

enum { QUICK_MS = 10 * 1000, SLOW_MS = 600 * 1000 };

static int fail_as_told(struct cli *cli, int status, const struct spillway_error *error) {
    return cli_fail(cli, status, error->code, "%s", error->message);
}

int cli_connect(struct cli *cli) {
    int timeout_ms = cli->timeout_ms ? cli->timeout_ms : cli->command->is_slow ? SLOW_MS : QUICK_MS;
    struct spillway_options options = {
        .path = cli->socket,
        .connect_timeout_ms = timeout_ms < QUICK_MS ? timeout_ms : QUICK_MS,
        .call_timeout_ms = timeout_ms,
    };
    struct spillway_result hello = {0};
    struct spillway_error error;
    int r;

    if (cli->client)
        return CLI_OK;
    r = spillway_connect(&options, &cli->client, &error);
    if (r == 0)
        r = spillway_hello(cli->client, &hello, &error);
    if (r == 0)
        cli->hello = cli_json_of(&hello.object);
    spillway_result_free(&hello);
    if (r != 0) {
        cli_disconnect(cli);
        return fail_as_told(cli, r == SPILLWAY_E_REFUSED ? CLI_FAILED : CLI_UNREACHABLE, &error);
    }
    return CLI_OK;
}

void cli_disconnect(struct cli *cli) {
    spillway_close(cli->client);
    json_decref(cli->hello);
    cli->client = NULL;
    cli->hello = NULL;
}

struct answer {
    bool is_done;
    int status;
    json_t *json; /* result, or what the daemon said is wrong */
    struct spillway_error error;
};

static void on_done(void *user, int status, const msgpack_object *result, const struct spillway_error *error) {
    struct answer *answer = user;

    answer->is_done = true;
    answer->status = status;
    answer->json = result ? cli_json_of(result) : NULL;
    if (error)
        answer->error = *error;
}

int cli_call(struct cli *cli, const char *method, json_t *params, json_t **ret_result) {
    int timeout_ms = cli->timeout_ms ? cli->timeout_ms : cli->command->is_slow ? SLOW_MS : QUICK_MS;
    struct answer answer = {0};
    const struct spillway_handler handler = {.on_done = on_done, .user = &answer};
    int r, status = cli_connect(cli);

    if (status != CLI_OK) {
        json_decref(params);
        return status;
    }
    r = spillway_start(cli->client, method, params ? cli_write_json : NULL, params, &handler, NULL, &answer.error);
    json_decref(params);
    while (r == 0 && !answer.is_done)
        r = spillway_wait(cli->client, timeout_ms, &answer.error);
    if (answer.is_done && answer.status == 0 && answer.json) {
        *ret_result = answer.json;
        return CLI_OK;
    }
    if (answer.is_done && answer.status == 0)
        return cli_fail_for_memory(cli);
    if (answer.json)
        cli_complain_as(cli, CLI_FAILED, answer.json);
    else
        fail_as_told(cli, CLI_FAILED, &answer.error);
    json_decref(answer.json);
    if (r != 0) /* nobody may tell `answer` any more */
        cli_disconnect(cli);
    return CLI_FAILED;
}

int cli_run_method(struct cli *cli, const struct cli_args *args) {
    json_t *result;
    int status = cli_call(cli, cli->command->method, json_incref(args->params), &result);

    if (status != CLI_OK)
        return status;
    if (cli->command->table && !cli->json)
        cli_print_table(json_object_get(result, cli->command->table));
    else
        cli_print_result(cli, result);
    json_decref(result);
    return CLI_OK;
}
