"""What modules were called before, and what they are called now."""

from __future__ import annotations

PLACES = {
    "exchange": "collectives",
    "zstd": "codecs.zstd",
    "state.saved": "state.disk.saved",
    "assets.code.symbols": "codecs.symbols",
    "assets.framing": "files.safetensors",
    "assets.readers": "uses.readers",
    "assets.splats": "uses.scenes",
    "assets.weights": "uses.models",
    "engines.diffusion": "uses.pictures.context_parallel",
    "engines.experts": "uses.pictures.expert_parallel",
    "engines.federated": "uses.federated",
    "engines.pipeline": "uses.training.pipeline",
    "engines.replicas": "uses.training.replicas",
    "engines.sync": "uses.following",
    "policies": "choosing",
    "policies.federated": "uses.federated.choosing",
    "policies.pipeline": "uses.training.pipeline.choosing",
    "policies.replicas": "uses.training.replicas.choosing",
    "recipes.base": "choosing.registry",
    "recipes.diffusion": "uses.pictures.context_parallel.recipes",
    "recipes.experts": "uses.pictures.expert_parallel.recipes",
    "recipes.federated": "uses.federated.recipes",
    "recipes.hook": "uses.training.replicas.script",
    "recipes.listing": "uses.listing",
    "recipes.pipeline": "uses.training.pipeline.recipes",
    "recipes.replicas": "uses.training.replicas.recipes",
    "recipes.scenes": "uses.scenes.recipes",
    "recipes.state": "uses.following.recipes",
    "lab": "runs",
    "lab.doctor": "uses.doctor.run",
    "lab.engines": "uses.kinds",
    "lab.federated": "uses.federated.run",
    "lab.following": "uses.following.run",
    "lab.pictures": "uses.pictures.run",
    "lab.planning": "uses.training.planning",
    "lab.scenes": "uses.scenes.run",
    "lab.shared": "runs.options",
    "lab.train": "uses.training.run",
    "lab.weights": "uses.models.run",
    "cli.terminal": "runs.terminal",
    "cli.states": "uses.following.commands",
    "cli.compare": "uses.training.commands.train",
    "cli.doctor": "uses.doctor.commands.doctor",
    "cli.federate": "uses.federated.commands.federate",
    "cli.federate_join": "uses.federated.commands.join",
    "cli.federate_serve": "uses.federated.commands.serve",
    "cli.follow": "uses.following.commands.follow",
    "cli.generate": "uses.pictures.commands.generate",
    "cli.pack_model": "uses.models.commands.pack_model",
    "cli.pack_options": "uses.packing",
    "cli.pack_scene": "uses.scenes.commands.pack_scene",
    "cli.plan": "uses.training.commands.plan",
    "cli.publish": "uses.following.commands.publish",
    "cli.train": "uses.training.commands.train",
    "cli.view": "uses.scenes.commands.view",
    "cli.states.inspecting": "cli.inspecting",
    "channels.frame": "channels.channel",
    "channels.slots": "channels.disk",
    "codecs.base": "codecs.codec",
    "codecs.inner": "codecs.codec",
    "codecs.kept": "codecs.sparse",
    "codecs.kernels.grid": "codecs.kernels.scales",
    "codecs.kernels.native": "codecs.kernels.kernel_calls",
    "codecs.kernels.scratch": "codecs.kernels.scales",
    "codecs.rows": "codecs.sparse",
    "files.folder": "files.local_folder",
    "files.header": "files.safetensors",
    "files.notes": "files.file_kinds",
    "files.place": "files.base",
    "files.proxy": "files.web_folder",
    "files.resting": "files",
    "files.wrapping": "files.safetensors",
    "policies.base": "choosing.policy",
    "policies.ladder": "choosing.policy",
    "exchange.base": "collectives.exchange",
    "exchange.framing": "collectives.exchange",
    "exchange.gather": "collectives.exchange",
    "exchange.group": "collectives.exchange",
    "exchange.posts": "collectives.exchange",
    "links.base": "links.link",
    "links.greeting": "links.security",
    "links.hub.clock": "links.hub.spoke",
    "links.hub.events": "links.hub.station",
    "links.loopback": "links.link",
    "links.meeting": "links.mesh",
    "links.pair.rate": "links.pair.estimate",
    "links.polled": "links.sockets",
    "links.relay.link": "links.relay.tunnel",
    "state.code": "state.patch_code",
    "state.code.class_split": "state.patch_code.classes",
    "state.code.gather": "state.patch_code.indexing",
    "state.code.jumps": "state.patch_code.changes",
    "state.code.masks": "state.patch_code.indexing",
    "state.code.numbers": "state.patch_code.patch_stream",
    "state.code.stream": "state.patch_code.patch_stream",
    "state.compare": "state.find_changes",
    "state.grid": "state.lossy",
    "state.kinds": "state.tensor_kinds",
    "state.overflow": "state.intake",
    "state.past": "state.log",
    "state.patches.lane": "state.patches.draft",
    "state.view": "state.binding",
    "runs.data.images": "runs.data.fashion",
    "runs.data.loss": "runs.data.task",
    "runs.data.packing": "runs.data.task",
    "runs.emulator.check": "runs.emulator.network_check",
    "runs.emulator.enter": "runs.emulator.namespace_entry",
    "runs.emulator.lateness": "runs.emulator.timing_error",
    "runs.emulator.lift": "runs.emulator.shaping_control",
    "runs.emulator.orphans": "runs.emulator.process_cleanup",
    "runs.emulator.relay": "runs.emulator.router",
    "runs.emulator.relay_process": "runs.emulator.session",
    "runs.machine.encoding": "runs.machine.standard_streams",
    "runs.machine.heap": "runs.machine.processor",
    "runs.machine.processes": "runs.machine.interrupts",
    "runs.models.source": "runs.models.model_source",
    "runs.models.weights": "runs.models.weight_loading",
    "runs.ranks.config": "runs.ranks.run_config",
    "runs.ranks.places": "runs.ranks.launcher",
    "runs.ranks.worker": "runs.ranks.rank_main",
    "runs.records.build": "runs.records.run_record",
    "runs.records.display": "runs.records.progress",
    "runs.records.holding": "runs.records.folder_lock",
    "runs.records.runs": "runs.records.finished_runs",
    "runs.records.schema": "runs.records.run_record",
    "runs.report.cards": "runs.report.elements",
    "runs.report.drawing": "runs.report.plotting",
    "runs.report.style": "runs.report.page",
    "runs.report.terminal": "runs.report.elements",
    "runs.terminal.command": "runs.terminal.shell_command",
    "runs.terminal.doing": "runs.terminal.activity",
    "runs.terminal.needs": "runs.terminal.activity",
    "runs.terminal.options": "runs.terminal.typer_options",
    "runs.terminal.output": "runs.machine.standard_streams",
    "runs.terminal.places": "runs.terminal.addresses",
}
FOLDERS = {"assets", "assets.code", "engines", "lab", "policies", "recipes"}  # that held what moved

for _old, _new, _names in (  # modules that became part of another one, or have another name
    (
        "engines.federated",
        "uses.federated",
        "server:aggregation_server intake:aggregation_server roster:aggregation_server "
        "message:update_messages shared:download training:local_training samples:local_training "
        "rates:local_training method:recipes row:parameters signature:parameters "
        "conductor:client_scheduler remote.words:remote.control_messages "
        "remote.pieces:remote.control_messages remote.door:remote.client_handshake "
        "remote.seat:remote.client_handshake remote.host:remote.remote_server "
        "remote.guest:remote.remote_client flower.plan:flower.records flower.absent:flower.strategy "
        "flower.host:flower.flwr_names flower.grid:flower.local_grid",
    ),
    (
        "uses.federated",
        "rounds",
        "aggregation:aggregation aggregation_server:aggregation_server client:client "
        "client_scheduler:client_scheduler download:download journal:journal local_training:local_training "
        "model_copy:model_copy parameters:parameters residuals:residuals update_messages:update_messages "
        "remote:remote choosing.client_profile:client_profile",
    ),
    (
        "policies.federated",
        "uses.federated.choosing",
        "device:client_profile shares:client_profile fixed:client_profile thinwire:true_cost cost:true_cost",
    ),
    (
        "lab.federated",
        "uses.federated.run",
        "splits:partitioner dealing:partitioner devices:fleet fleets:fleet machines:options "
        "deploy:deployment deployed:deployment worker:trainer simulate:simulation time:simulation "
        "run:comparison virtual:comparison joining:client_program terms:client_program models:client_models "
        "tasks:datasets serving:server_program recorder:federated_recorder setup:federated_setup",
    ),
    (
        "engines.sync",
        "uses.following",
        "push.target:push.reception push.partial_patch:push.reception push.ask:push.follower "
        "push.serving:push.send_schedule push.pace:push.send_schedule push.making:push.draft_maker "
        "push.relay:push.state_relay pull.proof:pull.manifest pull.keeping:pull.retention "
        "pull.route:pull.retention pull.fetching:pull.store_fetching pull.look:pull.store_fetching "
        "pull.reader:pull.store_reader pull.writer:pull.store_writer pull.writing:pull.store_writer "
        "source:published_tensors outlets:publish_targets using:follower_base",
    ),
    (
        "lab.following",
        "uses.following.run",
        "worker:demo_ranks job:demo_ranks demo:state_demo recorder:state_demo board:state_demo "
        "config:options",
    ),
    ("cli.states", "uses.following.commands", "layered:publishing"),
    (
        "engines.replicas",
        "uses.training.replicas",
        "buckets:ddp_hook coder:transport differences:local_steps gradients:synchroniser hook:ddp_hook "
        "install:script mail:transport members:ddp_site message:controller method:exchange_methods "
        "model:ddp_hook origin:ddp_hook pilot:controller power:power_sgd replicate:assembly "
        "replicator:synchroniser site:ddp_site steps:optimiser_steps table:flat_parameters tally:transport",
    ),
    ("engines.pipeline", "uses.training.pipeline", "stage:compressed_stage"),
    ("policies.replicas", "uses.training.replicas.choosing", "site:replica_policy"),
    ("policies.pipeline", "uses.training.pipeline.choosing", "site:pipeline_policy plan:pipeline_plan"),
    ("lab.planning", "uses.training.planning", "speed:planner"),
    (
        "lab.train",
        "uses.training.run",
        "checks:options config:options fields:options job:training_job launch:training_launch "
        "run:training_rank measured_cut:training_rank optimiser:stepper recorder:training_recorder "
        "replicating:stepper setup:stepper step_report:stepper record.cards:cards record.plots:cards "
        "record.plots_link:cards record.reaching:replica_cards record.replica_cards:replica_cards "
        "record.schema:record record.summary:summary",
    ),
    (
        "engines.diffusion",
        "uses.pictures",
        "coding:coding ends:coding keys:messages message:messages traffic:messages repairs:messages "
        "tally:messages clock:model_calls inputs:model_calls inquiry:model_calls weights:weight_checksums "
        "drawing:agreement seam:diffusers_names.interfaces host:diffusers_names.hooks "
        "host_hooks:diffusers_names.hooks host_plan:diffusers_names.plans "
        "host_blocks:diffusers_names.block_hooks division:context_parallel.modes "
        "batch:context_parallel.modes divided:context_parallel.sharding shares:context_parallel.sharding "
        "ulysses:context_parallel.attention gather:context_parallel.attention "
        "displaced:context_parallel.attention parts:context_parallel.attention "
        "later:context_parallel.guidance pipe:context_parallel.pipefusion",
    ),
    (
        "engines.experts",
        "uses.pictures",
        "seam:diffusers_names.interfaces host:diffusers_names.expert_layers "
        "session:expert_parallel.routing spread:expert_parallel.routing schedule:expert_parallel.routing "
        "owners:expert_parallel.routing slots:expert_parallel.routing crossing:expert_parallel.dispatch "
        "lines:expert_parallel.dispatch",
    ),
    (
        "lab.pictures",
        "uses.pictures.run",
        "run:generation run_experts:generation program:generation launch:generation images:recording "
        "quality:recording sampling:sheets",
    ),
    (
        "assets.splats",
        "uses.scenes",
        "decoding:layers kept:delivery thinwire:importance_coder about_packed:about_packed_scene "
        "code.grid:code.morton code.turns:code.orientations files.axes:files.foreign "
        "files.splat:files.scene_file files.ply_header:files.ply files.container:files.packed_scene "
        "view.native:view.render view.pictures:view.render view.colmap:view.given view.rooms:view.views "
        "page.writing:page.web_page page.chunk:page.web_page",
    ),
    (
        "lab.scenes",
        "uses.scenes.run",
        "reporting:left_pictures showing:left_pictures credit:left_pictures curve:cards demo:demo_program "
        "sending:demo_program packing:scene_packing",
    ),
    (
        "assets.weights",
        "uses.models",
        "feedback:moments about_packed:about_packed_model container:packed_model encoding:budgets "
        "model:weights_to_pack oneshot.layers:oneshot.quantiser oneshot.calibration:oneshot.supernet "
        "oneshot.costs:oneshot.supernet oneshot.training:oneshot.supernet_training "
        "oneshot.scheduler:oneshot.supernet_training oneshot.search:oneshot.width_search",
    ),
    (
        "lab.weights",
        "uses.models.run",
        "source:calibrated_source along:calibrated_source causal:calibrated_source placing:model_folder "
        "loading:model_folder layers:layerwise perplexity:layerwise scratch:scratch_files "
        "packing:model_packing demo:packing_demo",
    ),
):
    for _from, _to in (_name.split(":") for _name in _names.split()):
        PLACES[f"{_old}.{_from}"] = f"{_new}.{_to}"
        FOLDERS |= {
            _folder for _folder in (_old, f"{_old}.{_from}".rpartition(".")[0]) if "uses" not in _folder
        }
FOLDERS |= {_folder for _old in PLACES if (_folder := _old.rpartition(".")[0]) in PLACES}
